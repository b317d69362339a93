"""The model that is trained: a step on whole groups, and validation on held-out prompts."""

import lightning as L
import torch
from grpo_policy import LENGTH, Policy


class Actor(L.LightningModule):
    def __init__(self, learning_rate: float = 3e-3, clip: float = 0.2):
        super().__init__()
        self.policy, self.learning_rate, self.clip = Policy(), learning_rate, clip
        torch.set_num_threads(1)  # so small a model gains nothing from more, and the workers need the cores

    def training_step(self, batch, batch_idx):
        data, meta = batch
        prompts = batch.heads["prompt"][meta.group_index]  # the prompt of each row's group
        groups = data["reward"].split(torch.tensor(meta.group_index).bincount().tolist())  # one after the other
        advantages = torch.cat([(each - each.mean()) / (each.std(correction=0) + 1e-4) for each in groups])
        after = self.policy(torch.cat([prompts, data["answer"]], dim=1)[:, :-1])[:, LENGTH - 1 :]
        log_probs = after.gather(2, data["answer"].unsqueeze(2)).squeeze(2)
        ratio, gain = (log_probs - data["old_log_probs"]).exp(), advantages.view(-1, 1)
        self.log("reward", data["reward"].mean(), prog_bar=True)
        return -torch.min(ratio * gain, ratio.clamp(1 - self.clip, 1 + self.clip) * gain).mean()

    def validation_step(self, batch, batch_idx):
        answers, _ = self.policy.answer(batch.data["prompt"], greedy=True)
        self.log("accuracy", (answers == batch.data["solution"]).all(1).float().mean(), prog_bar=True, sync_dist=True)

    def on_validation_epoch_end(self):
        accuracy = self.trainer.callback_metrics["accuracy"]
        self.print(f"step {self.global_step}: {accuracy:.0%} of the held-out prompts are answered right", flush=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)
