# %% [markdown]
# # 04 Build your own DDP
#
# **How does a step of data-parallel training hide its communication?** (Draft: the solution cells only.)

# %%
# @first-cell

# %%
import contextlib

import torch
import torch.distributed as dist

from course_utils import check


# %%
# @exercise flatten points=2 minutes=8
def flatten(parameters):
    """Return one tensor: every gradient (zeros where there is none), then a flag for each, divided by the world size."""
    ### BEGIN SOLUTION
    parts = [torch.zeros_like(p).view(-1) if p.grad is None else p.grad.reshape(-1) for p in parameters]
    flags = torch.tensor([float(p.grad is not None) for p in parameters], dtype=parameters[0].dtype)
    return torch.cat([*parts, flags]).div_(dist.get_world_size())
    ### END SOLUTION


flatten = check("flatten", flatten)


# %%
# @exercise unflatten points=2 minutes=8
def unflatten(parameters, flat):
    """Give every parameter its part of `flat` as gradient; None where no rank had one."""
    ### BEGIN SOLUTION
    *parts, flags = flat.split([*(p.numel() for p in parameters), len(parameters)])
    for parameter, part, flag in zip(parameters, parts, flags.tolist(), strict=True):
        parameter.grad = part.view_as(parameter) if flag else None
    ### END SOLUTION


unflatten = check("unflatten", unflatten)


# %%
# @exercise make_buckets points=3 minutes=10
def make_buckets(parameters, cap_bytes):
    """Return lists of trainable parameters, the last first, each once, of one dtype and at most `cap_bytes` a list."""
    ### BEGIN SOLUTION
    buckets, room = [], 0
    for parameter in reversed(list(dict.fromkeys(p for p in parameters if p.requires_grad))):
        size = parameter.numel() * parameter.element_size()
        if not buckets or size > room or parameter.dtype != buckets[-1][0].dtype:
            buckets.append([])
            room = cap_bytes
        buckets[-1].append(parameter)
        room -= size
    return buckets
    ### END SOLUTION


make_buckets = check("make_buckets", make_buckets)


# %%
# @exercise own_ddp points=8 minutes=40
class own_ddp(torch.nn.Module):
    """A model whose gradients are averaged over all ranks, bucket by bucket, while backward goes on."""

    ### BEGIN SOLUTION
    def __init__(self, model, bucket_bytes):
        super().__init__()
        self.module = model
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.detach(), 0)
        self.buckets = make_buckets(model.parameters(), bucket_bytes)
        self.place = {p: number for number, bucket in enumerate(self.buckets) for p in bucket}
        self.active = True
        self._begin_anew()
        for parameter in self.place:
            parameter.register_post_accumulate_grad_hook(self._ready)

    def forward(self, *inputs, **more):
        return self.module(*inputs, **more)

    def _begin_anew(self):
        self.under_way = []
        self.missing = [set(bucket) for bucket in self.buckets]

    def _ready(self, parameter):
        if not self.active:
            return
        self.missing[self.place[parameter]].discard(parameter)
        # in the same order on every rank, also where a rank has not used some parameter
        while len(self.under_way) < len(self.buckets) and not self.missing[len(self.under_way)]:
            self._start()

    def _start(self):
        flat = flatten(self.buckets[len(self.under_way)])
        self.under_way.append((flat, dist.all_reduce(flat, async_op=True)))

    def synchronize(self):
        while len(self.under_way) < len(self.buckets):
            self._start()
        for bucket, (flat, request) in zip(self.buckets, self.under_way, strict=True):
            request.wait()
            unflatten(bucket, flat)
        self._begin_anew()

    @contextlib.contextmanager
    def no_sync(self):
        self.active = False
        try:
            yield
        finally:
            self.active = True
    ### END SOLUTION


own_ddp = check("own_ddp", own_ddp)
