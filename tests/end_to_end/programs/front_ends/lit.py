"""Lightning's Trainer: BatchNorm, a metric of all ranks, validation, a checkpoint."""

import os

import lightning
import torch


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(6, 8, bias=False), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 2)
        )

    def training_step(self, batch, _):
        loss = torch.nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, _):
        self.log("val_loss", torch.nn.functional.cross_entropy(self.layers(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.02)


lightning.seed_everything(5, verbose=False)
inputs = torch.rand(48, 6)
dataset = torch.utils.data.TensorDataset(inputs, (inputs.sum(1) > 3).long())
model = Classifier()
trainer = lightning.Trainer(
    accelerator="cpu",
    strategy="ddp",
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    max_epochs=2,
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    gradient_clip_val=1.0,
    accumulate_grad_batches=2,
)
loaders = [torch.utils.data.DataLoader(dataset, batch_size=4, shuffle=shuffle) for shuffle in (True, False)]
trainer.fit(model, *loaders)
assert trainer.world_size > 1
