# SPDX-License-Identifier: Apache-2.0
"""PPO with players in processes of their own, and a trainer on Fabric: python -m examples.ppo_cartpole

Players and trainer know only the queue. A player puts what it played as samples. The trainer puts each new version of
the agent as one sample of the partition ``agent``. Every player reads it as a task of its own.
"""

from __future__ import annotations

import time
from collections import deque

import torch
from jsonargparse import auto_cli
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn.functional import mse_loss
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import transfer_queue as tq
from lightning_tq import FabricLoader, Producer, Stream

DISCOUNT, TRACE = 0.98, 0.8  # of generalized advantage estimation (arxiv.org/abs/1506.02438)
CLIP = 0.2
SOLVED = 475.0  # mean return of 100 episodes, by the definition of CartPole-v1; the highest is 500


class Agent(nn.Module):
    """Says how likely it takes each action, and what return it expects."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
        self.critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, observations: Tensor) -> tuple[Categorical, Tensor]:
        """[B, 4] -> the distribution of actions, and values [B]."""
        return Categorical(logits=self.actor(observations)), self.critic(observations).squeeze(-1)


# ---- the player ----


def play(games: int, steps: int, worker: int) -> None:
    """Runs in a process of its own. Plays ``steps`` steps of each game with each version of the agent."""
    torch.set_num_threads(1)
    torch.manual_seed(worker)
    client, agent, table = tq.get_client(), Agent().requires_grad_(False), Games(games, seed=worker * games)
    for data, _ in tq.StreamingDataset(None, 1, 1, ["parameters"], "agent", f"player-{worker}", 0, layout="dense"):
        vector_to_parameters(data["parameters"][0], agent.parameters())
        client.put(table.play(agent, steps), partition_id="played")


class Games:
    """Games of CartPole that are played at the same time."""

    def __init__(self, count: int, seed: int) -> None:
        import gymnasium

        self._games = [gymnasium.make("CartPole-v1") for _ in range(count)]
        self._observations = torch.stack(
            [torch.as_tensor(game.reset(seed=seed + number)[0]) for number, game in enumerate(self._games)]
        )
        self._returns = torch.zeros(count)

    def play(self, agent: Agent, steps: int) -> dict[str, Tensor]:
        """One row per step and game: [steps * games, ...]. ``returns`` is NaN where no episode ended."""
        rows: list[dict[str, Tensor]] = []
        for _ in range(steps):
            policy, values = agent(self._observations)
            actions = policy.sample()
            row = {"observations": self._observations, "actions": actions, "log_probs": policy.log_prob(actions)}
            rows.append({**row, "values": values, **self._step(agent, actions)})
        played = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        _, last = agent(self._observations)
        played["advantages"] = advantages(
            played.pop("rewards"), played["values"], last, played.pop("ends"), played.pop("after_end")
        )
        return {name: values.flatten(0, 1) for name, values in played.items()}

    def _step(self, agent: Agent, actions: Tensor) -> dict[str, Tensor]:
        count = len(self._games)
        rewards, ends, after_end = torch.zeros(count), torch.zeros(count, dtype=torch.bool), torch.zeros(count)
        returns, observations = torch.full((count,), torch.nan), []
        for number, (game, action) in enumerate(zip(self._games, actions.tolist(), strict=True)):
            observation, rewards[number], fallen, too_long, _ = game.step(action)
            self._returns[number] += rewards[number]
            if fallen or too_long:
                if too_long:  # the pole still stood, so more would have come
                    after_end[number] = agent(torch.as_tensor(observation)[None])[1][0]
                ends[number], returns[number], self._returns[number] = True, self._returns[number].item(), 0.0
                observation, _ = game.reset()
            observations.append(torch.as_tensor(observation))
        self._observations = torch.stack(observations)
        return {"rewards": rewards, "ends": ends, "after_end": after_end, "returns": returns}


def advantages(rewards: Tensor, values: Tensor, last: Tensor, ends: Tensor, after_end: Tensor) -> Tensor:
    """How much better each step was than expected, [T, G].

    Args:
        rewards: [T, G] of each step.
        values: [T, G] expected before each step.
        last: [G] expected after the last step.
        ends: [T, G] bool, True where the step ended its episode.
        after_end: [T, G] expected after the end, where an episode was only cut off.
    """
    result, trace = torch.zeros_like(rewards), torch.zeros_like(last)
    following = torch.cat([values[1:], last[None]])
    following = torch.where(ends, after_end, following)
    for step in reversed(range(len(rewards))):
        surprise = rewards[step] + DISCOUNT * following[step] - values[step]
        trace = surprise + DISCOUNT * TRACE * trace * ~ends[step]
        result[step] = trace
    return result


# ---- the trainer ----


def learn(fabric: Fabric, agent: nn.Module, optimizer: torch.optim.Optimizer, data: dict, passes: int) -> None:
    """Several passes over the same rows, for as long as the new policy stays near the one that played."""
    gains = data["advantages"]
    gains = (gains - gains.mean()) / (gains.std() + 1e-8)
    expected = data["values"] + data["advantages"]
    for _ in range(passes):
        policy, values = agent(data["observations"])
        ratio = (policy.log_prob(data["actions"]) - data["log_probs"]).exp()
        gain = torch.min(ratio * gains, ratio.clamp(1 - CLIP, 1 + CLIP) * gains).mean()
        optimizer.zero_grad()
        fabric.backward(0.5 * mse_loss(values, expected) - gain)
        fabric.clip_gradients(agent, optimizer, max_norm=0.5)
        optimizer.step()


def main(
    updates: int = 600, players: int = 2, games: int = 4, steps: int = 32, passes: int = 20, devices: int = 1
) -> float:
    """Learn CartPole. Returns the mean return of the last 100 episodes.

    Args:
        updates: Versions of the agent, at most. It ends before that when the game is solved.
        players: Processes that play.
        games: Games per player.
        steps: Steps of each game per update.
        passes: Optimizer steps per update.
        devices: Processes that train.
    """
    fabric = Fabric(accelerator="cpu", devices=devices)
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    torch.set_num_threads(1)  # the players need the cores
    agent = Agent()
    agent, optimizer = fabric.setup(agent, torch.optim.Adam(agent.parameters(), lr=1e-3, eps=1e-5))
    rows = players * games * steps
    stream = Stream(
        partition="played",
        task="learn",
        fields=["observations", "actions", "log_probs", "values", "advantages", "returns"],
        batch_size=rows // devices,
        num_batches=updates,
        clear_consumed=True,
    )
    recent: deque[float] = deque(maxlen=100)
    started, mean = time.perf_counter(), 0.0
    producer = Producer(target=play, args={"games": games, "steps": steps}, count=players)
    with FabricLoader(fabric, stream, producers=[producer]) as loader:
        version = publish(fabric, loader, agent)
        for update, (data, _) in enumerate(loader, start=1):
            optimizer.param_groups[0]["lr"] = 1e-3 * (1 - update / (updates + 1))
            learn(fabric, agent, optimizer, data, passes)
            version = publish(fabric, loader, agent, replaces=version)
            returns = fabric.all_gather(data["returns"]).flatten()
            recent.extend(returns[~returns.isnan()].tolist())
            mean = sum(recent) / max(1, len(recent))
            solved = len(recent) == 100 and mean >= SOLVED
            if update % 25 == 0 or solved:
                seconds = time.perf_counter() - started
                fabric.print(f"update {update:3}, {update * rows:6} steps, mean return {mean:5.1f} [{seconds:.0f} s]")
            if solved:
                break
        if fabric.is_global_zero:
            loader.client.seal_partition("agent")
    fabric.print(f"{'solved' if mean >= SOLVED else 'not solved'}: mean return {mean:.1f} of {len(recent)} episodes")
    return mean


def publish(
    fabric: Fabric, loader: FabricLoader, agent: nn.Module, replaces: tq.BatchMeta | None = None
) -> tq.BatchMeta | None:
    """Put a new version of the agent, which the players wait for. All of them have played with the one it replaces."""
    if not fabric.is_global_zero:
        return None
    if replaces is not None:
        loader.client.clear_samples(replaces)
    parameters = parameters_to_vector(agent.parameters()).detach()
    return loader.client.put({"parameters": parameters[None]}, partition_id="agent")


if __name__ == "__main__":
    auto_cli(main)
