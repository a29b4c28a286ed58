/** The service that tests/clients/conformance.py of Etude describes and tests. */

import { Service } from "../src/index.js";

const service = new Service({
  capacity: 3,
  token: "secret",
  tasks: { train: Array.from({ length: 7 }, (_, n) => ({ id: `${n}`, prompt: `sing ${n}` })) },
  rollout: async (asked) => {
    if (asked.task.id === "broken") throw new Error("out of order");
    if (asked.task.id === "slow") {
      await new Promise((resolve) => asked.signal.addEventListener("abort", resolve));
    }
    const { content } = await asked.chat([{ role: "user", content: asked.task.prompt ?? "" }]);
    return {
      reward: content === "aei" ? 1 : 0,
      parts: [{ name: "vowels", value: content?.length ?? 0 }],
      artifacts: [{ name: "song", text: content ?? "" }],
    };
  },
});
console.log(`environment at ${(await service.listen(0)).url}`);
