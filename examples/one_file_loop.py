"""The whole algorithm in one file: synchronous GRPO.

    python examples/one_file_loop.py RUN.toml [key=value ...]

Take a few tasks. Let the model try each one several times, in sessions of several turns with real
tools. Grade every attempt by hidden tests. Make attempts that did better than the average of their
task more likely, and those that did worse less likely. Repeat with the new weights.

The real system does the same with many concurrent requests, several processes, and weights that are
delivered while sessions run. In deterministic mode, which allows none of this, it must produce the
losses of this file to the bit (tests/test_oracle.py). This file therefore shares the object of
learning with it (model, tokenizer, tasks, tools, grading), and has its own, simplest version of the
learning itself: the session's tokens, the decoding, the advantages, the loss, the step.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import numpy as np
import torch
from torch import Tensor

from etude.core.config import RunConfig, parse
from etude.core.sandbox import SandboxPool
from etude.core.seeds import derive
from etude.core.stages import RlConfig
from etude.engine.sampler import inverse_cdf
from etude.harness.agent import NUDGE, parse_arguments
from etude.harness.tools import SCHEMAS, SUBMIT, Tools
from etude.model.attention import CausalAttention, KVCache, PagedAttention
from etude.model.tokenizer import ChatTokenizer, Message
from etude.model.transformer import ModelConfig, Transformer
from etude.rewards.tests import grade
from etude.sandbox.pool import open_sandbox_pool
from etude.store.runs import Run
from etude.tasks.factory import make_tasks
from etude.tasks.repair import RepairTask
from etude.train.masters import round_into
from etude.train.schedule import learning_rate
from etude.trainer.prepare import model_files, store_files
from etude.trainer.trainer import Trainer

GRADE_S = 20.0  # for the hidden tests of one attempt


@dataclass
class Session:
    """One attempt: its tokens, the mask and log-probs of the sampled ones, and its reward."""

    tokens: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reward: float = 0.0
    advantage: float = 0.0

    def read(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        self.mask += [False] * len(tokens)
        self.logprobs += [0.0] * len(tokens)

    def say(self, token: int, logprob: float) -> None:
        self.tokens.append(token)
        self.mask.append(True)
        self.logprobs.append(logprob)


@dataclass
class Agent:
    """The agent loop: the model calls tools and reads their answers until it submits or runs out
    of turns."""

    model: Transformer
    tokenizer: ChatTokenizer
    pool: SandboxPool
    max_turns: int
    max_tokens: int
    temperature: float

    async def attempt(self, repair: RepairTask, seed: int) -> Session:
        tokenizer, context = self.tokenizer, self.model.config.max_position_embeddings
        session = Session()
        messages: list[Message] = repair.task.opening
        text = tokenizer.render(messages, SCHEMAS, answer=True)
        async with self.pool.open(repair.task.sandbox) as sandbox:
            tools = Tools(repair.task, sandbox)
            for turn in range(self.max_turns):
                session.read(tokenizer.encode(text))
                assert len(session.tokens) < context, (
                    "a session has filled the context: set a larger model.max_context"
                )
                said = self.answer(session, derive(seed, turn))
                messages.append(tokenizer.parse(said, SCHEMAS, lambda number: f"call_{number}"))
                replies, submitted = await act(messages[-1], tools)
                if submitted:
                    break
                text = behind(
                    tokenizer, messages, replies, ended=said[-1] == tokenizer.eos_token_id
                )
                messages += replies
            score = await grade(repair, sandbox, self.pool, timeout_s=GRADE_S)
            session.reward = score.reward
        return session

    @torch.inference_mode()
    def answer(self, session: Session, seed: int) -> list[int]:
        """Sample token by token until the end of the turn. The first forward pass reads the whole
        session so far."""
        begin, context = len(session.tokens), self.model.config.max_position_embeddings
        cache, num_read = (
            KVCache(self.model.config, 1, context, like=self.model.rope),
            0,
        )  # one block, as long as it gets
        for u in np.random.Generator(np.random.PCG64(seed)).random(
            min(self.max_tokens, context - begin)
        ):
            new, places = (
                torch.tensor(session.tokens[num_read:]),
                torch.arange(num_read, len(session.tokens)),
            )
            attend = PagedAttention(
                cache, ids=[0], block_table_GBM=np.array([[[0]]]), starts=[0],
                slot_mapping_GN=places[None].numpy(), lengths=[len(session.tokens)],
                num_decode=int(num_read > 0),
            )  # fmt: skip
            logits = self.model.logits(self.model(new, places, attend)[-1:])
            p = torch.softmax(logits / self.temperature, dim=-1)
            token = int(inverse_cdf(p, torch.tensor([u])))
            num_read = len(session.tokens)
            session.say(token, float(p[0, token].log()))
            if token == self.tokenizer.eos_token_id:
                break
        return session.tokens[begin:]


async def act(answer: Message, tools: Tools) -> tuple[list[Message], bool]:
    """Execute the model's tool calls. Return the messages with the results, and True if the model
    has submitted."""
    replies: list[Message] = []
    for call in answer.get("tool_calls", []):
        name, arguments = call["function"]["name"], parse_arguments(call["function"]["arguments"])
        replies.append(
            {
                "role": "tool",
                "tool_call_id": call["id"],
                "content": await tools.call(name, arguments),
            }
        )
        if name == SUBMIT:
            return replies, True
    return replies or [{"role": "user", "content": NUDGE}], False


def behind(
    tokenizer: ChatTokenizer, messages: list[Message], replies: list[Message], *, ended: bool
) -> str:
    """The text of the template after the model's answer, which is the last of `messages`. It begins
    with the end-of-turn token only if the model was cut off before sampling one itself. Sampled
    tokens are never tokenized again."""
    end = tokenizer.render(messages, SCHEMAS).rfind(tokenizer.eos_token)
    return tokenizer.render(messages + replies, SCHEMAS, answer=True)[
        end + len(tokenizer.eos_token) * ended :
    ]


def tasks_forever(tasks: Sequence[RepairTask], seed: int) -> Iterator[tuple[RepairTask, int]]:
    """All tasks in random order, again and again, each with the number of its earlier
    occurrences."""
    epoch = 0
    while True:
        rng = Random(derive(seed, "order", epoch))
        drawn = {task.task.id: rng.random() for task in tasks}
        order = sorted(tasks, key=lambda task: drawn[task.task.id], reverse=True)
        yield from ((task, epoch) for task in order)
        epoch += 1


def center(group: Sequence[Session]) -> bool:
    """Set each advantage to the reward minus the mean of the group. False if all rewards are equal:
    such a group teaches nothing."""
    mean = sum(session.reward for session in group) / len(group)
    for session in group:
        session.advantage = session.reward - mean
    return len({session.reward for session in group}) > 1


def backward(model: Transformer, session: Session, num_tokens: int, rl: RlConfig) -> float:
    """Add the gradient of one session and return its loss. `num_tokens` is the number of sampled
    tokens in the whole batch."""
    tokens, mask = torch.tensor([session.tokens]), torch.tensor([session.mask])
    hidden = model(tokens[:, :-1], torch.arange(tokens.shape[1] - 1)[None], CausalAttention())
    said = mask[:, 1:]  # a token is predicted at the position before it
    every_logp = torch.log_softmax(model.logits(hidden[said]) / rl.temperature, dim=-1)
    logp = every_logp.gather(-1, tokens[:, 1:][said][:, None]).squeeze(-1)
    # Importance ratio of the current policy to the one that sampled the token. Here it differs from
    # 1 only by rounding: decoding and training add the same numbers in a different order. It is a
    # constant for the gradient.
    ratio = (logp.detach() - torch.tensor([session.logprobs])[mask]).exp()
    loss = (-ratio.clamp(max=rl.correction_cap) * session.advantage * logp).sum() / num_tokens
    loss.backward()
    return loss.item()


def round_to_bf16(model: Transformer, masters: Mapping[str, Tensor]) -> None:
    """Copy the masters to the model, rounded to bf16 as in published weights. The masters keep
    changes that are too small for bf16."""
    for name, parameter in model.named_parameters():
        round_into(parameter, masters[name])


async def train(c: RunConfig, rl: RlConfig, pool: SandboxPool) -> list[float]:
    """Run the loop and return the loss of every step."""
    files, masters = start(c)
    model = Transformer(ModelConfig.from_json(files["config.json"]))
    optimizer = torch.optim.AdamW(
        masters.values(), lr=rl.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    round_to_bf16(model, masters)
    agent = Agent(
        model, ChatTokenizer(files), pool, c.harness.max_turns, c.harness.max_tokens, rl.temperature
    )
    stream = tasks_forever(make_tasks("train", c.tasks.train, c.seed), c.seed)
    losses = []
    for step in range(1, rl.steps + 1):
        batch: list[Session] = []
        rewards: list[float] = []
        while len(batch) < rl.groups_per_step * rl.group_size:
            repair, epoch = next(stream)
            numbers = range(epoch * rl.group_size, (epoch + 1) * rl.group_size)
            group = [
                await agent.attempt(repair, derive(c.seed, repair.task.id, number))
                for number in numbers
            ]
            rewards += [session.reward for session in group]
            if center(group):
                batch += group

        num_tokens = sum(sum(session.mask) for session in batch)
        losses.append(sum(backward(model, session, num_tokens, rl) for session in batch))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for name, parameter in model.named_parameters():
            masters[name].grad, parameter.grad = parameter.grad, None
        optimizer.param_groups[0]["lr"] = learning_rate(
            step - 1, lr=rl.lr, warmup=rl.warmup_steps, total=rl.steps, decay=rl.lr_schedule
        )
        optimizer.step()
        round_to_bf16(model, masters)
        print(
            f"step {step}  loss {losses[-1]:+.6f}  solved {sum(rewards):.0f} of {len(rewards)}",
            flush=True,
        )
    return losses


def start(c: RunConfig) -> tuple[dict[str, bytes], dict[str, Tensor]]:
    """The model at the start of rl: its small files and its fp32 weights, after the run's stages
    before rl, which the real system's own code executes."""
    run = Run.open("memory:")
    store_files(run, model_files(c))
    before = c.model_copy(update={"stage": tuple(stage for stage in c.stage if stage.kind != "rl")})
    trainer = Trainer(run, before, emit=lambda event: None)
    trainer.train()
    state = trainer.learner.state().items()
    return trainer.files, {
        name.removeprefix("master."): t for name, t in state if name.startswith("master.")
    }


def run_oracle(c: RunConfig) -> list[float]:
    (rl,) = (stage for stage in c.stage if isinstance(stage, RlConfig))

    async def run() -> list[float]:
        pool = open_sandbox_pool(c.sandbox.isolation)
        try:
            return await train(c, rl, pool)
        finally:
            await pool.close()

    return asyncio.run(run())


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(run_oracle(parse(Path(sys.argv[1]).read_text(), sys.argv[2:]))))
