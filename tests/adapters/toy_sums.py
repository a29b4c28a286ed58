import verifiers.v1 as vf

__all__ = ["Sums"]


class Adder(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @classmethod
    def toolsets(cls, config):
        return [Adder(vf.ToolsetConfig())]

    @vf.reward
    async def right(self, trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def calls(self, trace) -> float:
        return float(len(trace.tool_messages))


class Sums(vf.Taskset[SumTask]):
    def load(self):
        for n in range(20):
            yield SumTask(SumData(prompt=f"{n} + 3 = ?", answer=str(n + 3)), self.config.task)


if __name__ == "__main__":
    Adder.run()
