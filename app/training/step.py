import torch

from app.data.sampler import Plan, plan_epoch
from app.data.transforms import normalize, warp
from app.training.optimizers import average_share, copy_into
from app.training.state import Run

# Steps before a capture: in the first ones libraries load their kernels, and
# DistributedDataParallel arranges its buckets and measures itself.
WARM_UP, WARM_UP_TOGETHER = 3, 11


class Steps:
    """Takes the steps of a run, epoch by epoch.

    What a step works with is found on the device by the step's index, which is there too. So a step
    needs nothing from the host, and on CUDA it is captured once as a graph and then replayed: one
    launch instead of some two hundred, which take ten times as long as what they launch.

    Args:
        run: The run; its learner is what the steps change.

    Attributes:
        returned: What `Learner.step` gave for each step of the epoch that was taken, float32
            [steps, 3], on the device.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.returned = torch.zeros(run.epoch_steps, 3, device=run.device)
        self._index = torch.zeros(1, dtype=torch.int64, device=run.device)
        self._rates = torch.zeros(run.epoch_steps, 2, device=run.device)
        self._plan: Plan | None = None
        self._graph: torch.cuda.CUDAGraph | None = None

    def begin(self, epoch: int, index: int) -> None:
        """Lay out what the steps of an epoch work with, of which `index` have been taken."""
        run = self.run
        share = run.world.rank, run.world.size
        plan = plan_epoch(
            run.cfg.seed, epoch, len(run.data.train), run.batch_size, run.augment, share
        )
        first = epoch * run.epoch_steps
        rates = [
            (run.rate(step), average_share(step, run.cfg.optim))
            for step in range(first, first + run.epoch_steps)
        ]
        self._rates.copy_(torch.tensor(rates))
        self._index.fill_(index)
        if self._plan is not None:
            self._plan.copy_(plan)
            return
        self._plan = plan.to(run.device)
        if run.learner.stream is not None:
            with torch.cuda.device(run.device):
                self._graph = self._capture(run.learner.stream)

    def take(self) -> None:
        """Take the next step."""
        if self._graph is None:
            self._step()
        else:
            self._graph.replay()

    def _step(self) -> None:
        run, plan, data = self.run, self._plan, self.run.data
        assert plan is not None
        batch = plan.batches.index_select(0, self._index)[0]
        images, labels = data.train.images[batch], data.train.labels[batch]
        if plan.maps is not None:
            images = warp(images.float(), plan.maps.index_select(0, self._index)[0])
        inputs = normalize(images, data.mean, data.std)
        rate, share = self._rates.index_select(0, self._index)[0]
        result = run.learner.step(inputs, labels, rate, share)
        self.returned.index_copy_(0, self._index, result[None])
        self._index += 1

    def _capture(self, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
        """Capture a step, and leave everything as it was."""
        state = [*self.run.learner.tensors(), self._index]
        before = [tensor.clone() for tensor in state]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP if self.run.world.size == 1 else WARM_UP_TOGETHER):
                self._step()
                copy_into(state, before)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # the threads of NCCL may go on asking the device
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self._step()
        return graph
