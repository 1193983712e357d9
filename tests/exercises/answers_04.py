"""Right and wrong answers to the exercises of lesson 04, as learners write them."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.exercises.judged import Family

flatten = Family("flatten")
unflatten = Family("unflatten")
make_buckets = Family("make_buckets")
own_ddp = Family("own_ddp")
accumulate = Family("accumulate")
clipped_step = Family("clipped_step")


# ---- flatten


@flatten.accepted
def flatten_by_cat(parameters):
    parts = [torch.zeros_like(p).view(-1) if p.grad is None else p.grad.reshape(-1) for p in parameters]
    flags = torch.tensor([float(p.grad is not None) for p in parameters], dtype=parameters[0].dtype)
    return torch.cat([*parts, flags]).div_(dist.get_world_size())


@flatten.accepted
def flatten_by_filling(parameters):
    lengths = [p.numel() for p in parameters]
    flat = parameters[0].detach().new_zeros(sum(lengths) + len(lengths))
    place = 0
    for number, p in enumerate(parameters):
        if p.grad is not None:
            flat[place : place + p.numel()] = p.grad.flatten()
            flat[number - len(parameters)] = 1
        place += p.numel()
    return flat / dist.get_world_size()


@flatten.accepted
def flatten_part_by_part(parameters):
    world, parts, flags = dist.get_world_size(), [], []
    for p in parameters:
        has = p.grad is not None
        parts.append((p.grad.contiguous() if has else torch.zeros_like(p)).flatten().detach() / world)
        flags.append(1 / world if has else 0.0)
    return torch.cat((torch.cat(parts), torch.tensor(flags, dtype=parts[0].dtype)))


@flatten.rejected("Divide by the world size first")
def flatten_without_dividing(parameters):
    return flatten_by_cat(parameters) * dist.get_world_size()


@flatten.rejected("and then a flag for each parameter")
def flatten_without_flags(parameters):
    return flatten_by_cat(parameters)[: -len(parameters)]


@flatten.rejected("the flags are not")
def flatten_with_whole_flags(parameters):
    flat = flatten_by_cat(parameters)
    flat[-len(parameters) :] *= dist.get_world_size()
    return flat


@flatten.rejected("give them the parameters'")
def flatten_with_flags_of_the_default_dtype(parameters):
    parts = [torch.zeros_like(p).reshape(-1) if p.grad is None else p.grad.reshape(-1) for p in parameters]
    flags = torch.tensor([float(p.grad is not None) for p in parameters])
    return torch.cat([*parts, flags]) / dist.get_world_size()


@flatten.rejected("also one that is all zeros")
def flatten_that_takes_zeros_for_none(parameters):
    flat = flatten_by_cat(parameters)
    for number, p in enumerate(parameters, start=-len(parameters)):
        flat[number] *= p.grad is not None and bool(p.grad.any())
    return flat


@flatten.rejected("zeros where there is none")
def flatten_that_leaves_out_what_is_missing(parameters):
    has = [p for p in parameters if p.grad is not None]
    flags = torch.tensor([float(p.grad is not None) for p in parameters], dtype=parameters[0].dtype)
    return torch.cat([*(p.grad.reshape(-1) for p in has), flags]) / dist.get_world_size()


@flatten.rejected("a copy")
def flatten_that_divides_in_place(parameters):
    flat = flatten_by_cat(parameters)
    for p in parameters:
        if p.grad is not None:
            p.grad /= 2
    return flat


@flatten.rejected("view size is not compatible")
def flatten_by_view(parameters):
    parts = [torch.zeros_like(p).view(-1) if p.grad is None else p.grad.view(-1) for p in parameters]
    return torch.cat(parts)


@flatten.rejected("is there a return?")
def flatten_to_nothing(parameters):
    pass


# ---- unflatten


@unflatten.accepted
def unflatten_by_split(parameters, flat):
    *parts, flags = flat.split([*(p.numel() for p in parameters), len(parameters)])
    for parameter, part, flag in zip(parameters, parts, flags.tolist(), strict=True):
        parameter.grad = part.view_as(parameter) if flag else None


@unflatten.accepted
def unflatten_by_places(parameters, flat):
    place, flags = 0, flat[-len(parameters) :]
    for number, p in enumerate(parameters):
        part = flat[place : place + p.numel()]
        place += p.numel()
        p.grad = part.reshape(p.shape).clone() if flags[number] > 0 else None


@unflatten.accepted
def unflatten_in_place(parameters, flat):
    """Writes into the gradients that are there."""
    count = len(parameters)
    for p, flag in zip(reversed(parameters), reversed(flat[-count:]), strict=True):
        end = sum(q.numel() for q in parameters[: [q is p for q in parameters].index(True) + 1])
        if flag == 0:
            p.grad = None
            continue
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        p.grad.copy_(flat[end - p.numel() : end].view(p.shape))


@unflatten.rejected("A flag of 0 says that no rank had a gradient")
def unflatten_to_zeros(parameters, flat):
    *parts, _ = flat.split([*(p.numel() for p in parameters), len(parameters)])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part.view_as(parameter)


@unflatten.rejected("also if the mean is all zeros")
def unflatten_that_looks_for_zeros(parameters, flat):
    unflatten_to_zeros(parameters, flat)
    for parameter in parameters:
        if not parameter.grad.any():
            parameter.grad = None


@unflatten.rejected("also a rank that had none")
def unflatten_where_something_is(parameters, flat):
    before = [p.grad for p in parameters]
    unflatten_by_split(parameters, flat)
    for p, gradient in zip(parameters, before, strict=True):
        p.grad = None if gradient is None else p.grad


@unflatten.rejected("not added to it")
def unflatten_on_top(parameters, flat):
    before = [p.grad for p in parameters]
    unflatten_by_split(parameters, flat)
    for p, gradient in zip(parameters, before, strict=True):
        if p.grad is not None and gradient is not None:
            p.grad = p.grad + gradient


@unflatten.rejected("nothing has been put in its place")
def unflatten_into_copies(parameters, flat):
    before = [p.grad for p in parameters]
    unflatten_by_split(parameters, flat)
    for p, gradient in zip(parameters, before, strict=True):
        p.grad = p.grad if gradient is None or p.grad is None else gradient


@unflatten.rejected("a second time")
def unflatten_and_divide(parameters, flat):
    flat[: -len(parameters)] /= dist.get_world_size()
    unflatten_by_split(parameters, flat)


@unflatten.rejected("so some rank had a gradient")
def unflatten_what_half_the_ranks_have(parameters, flat):
    flat[-len(parameters) :] = (flat[-len(parameters) :] > 0.4).to(flat.dtype)
    unflatten_by_split(parameters, flat)


# ---- make_buckets


@make_buckets.accepted
def buckets_in_one_loop(parameters, cap_bytes):
    buckets, size = [], cap_bytes
    for parameter in reversed(list(parameters)):
        if not parameter.requires_grad:
            continue
        if size >= cap_bytes or parameter.dtype != buckets[-1][0].dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += parameter.numel() * parameter.element_size()
    return buckets


@make_buckets.accepted
def buckets_by_dtype(parameters, cap_bytes):
    """A bucket of each dtype stands open."""
    done, opened = [], {}
    for parameter in list(parameters)[::-1]:
        if parameter.requires_grad:
            bucket = opened.setdefault(parameter.dtype, [])
            bucket.append(parameter)
            if sum(one.nbytes for one in bucket) >= cap_bytes:
                done.append(tuple(opened.pop(parameter.dtype)))
    return done + list(opened.values())


@make_buckets.accepted
def buckets_as_torch_makes_them(parameters, cap_bytes):
    trained = [p for p in parameters if p.requires_grad][::-1]
    if not trained:
        return []
    numbers, _ = dist._compute_bucket_assignment_by_size(trained, [cap_bytes])
    return [[trained[number] for number in bucket] for bucket in numbers]


@make_buckets.rejected("go through them in reverse")
def buckets_from_the_front(parameters, cap_bytes):
    return buckets_in_one_loop(list(parameters)[::-1], cap_bytes)


@make_buckets.rejected("never gets a gradient")
def buckets_with_frozen_parameters(parameters, cap_bytes):
    buckets, size = [[]], 0
    for parameter in reversed(list(parameters)):
        if size >= cap_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += parameter.nbytes
    return buckets


@make_buckets.rejected("a tensor has one dtype")
def buckets_of_mixed_dtypes(parameters, cap_bytes):
    return buckets_with_frozen_parameters((p for p in parameters if p.requires_grad), cap_bytes)


@make_buckets.rejected("Fill it up")
def buckets_of_one(parameters, cap_bytes):
    return [[p] for p in reversed(list(parameters)) if p.requires_grad]


@make_buckets.rejected("the next one begins a new bucket")
def one_bucket(parameters, cap_bytes):
    return [[p for p in reversed(list(parameters)) if p.requires_grad]]


@make_buckets.rejected("Fill it up")
def buckets_below_the_cap(parameters, cap_bytes):
    buckets, size = [], 0
    for parameter in reversed(list(parameters)):
        if not parameter.requires_grad:
            continue
        if not buckets or size + parameter.nbytes > cap_bytes or parameter.dtype != buckets[-1][0].dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += parameter.nbytes
    return buckets


@make_buckets.rejected("Fill it up")
def buckets_in_elements_as_if_of_8_bytes(parameters, cap_bytes):
    buckets, size = [], cap_bytes
    for parameter in reversed(list(parameters)):
        if not parameter.requires_grad:
            continue
        if size >= cap_bytes or parameter.dtype != buckets[-1][0].dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += parameter.numel() * 8
    return buckets


@make_buckets.rejected("Fill it up")
def buckets_in_elements_as_if_of_4_bytes(parameters, cap_bytes):
    buckets, size = [], cap_bytes
    for parameter in reversed(list(parameters)):
        if not parameter.requires_grad:
            continue
        if size >= cap_bytes or parameter.dtype != buckets[-1][0].dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += parameter.numel() * 4
    return buckets


@make_buckets.rejected("the parameters themselves")
def buckets_of_numbers(parameters, cap_bytes):
    return [[p.numel() for p in bucket] for bucket in buckets_in_one_loop(parameters, cap_bytes)]


# ---- own_ddp


def broadcast(model):
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.data, 0)


@own_ddp.accepted
class DDPAsInTheLesson(torch.nn.Module):
    def __init__(self, model, bucket_bytes):
        super().__init__()
        self.module = model
        self.start_equal()
        self.buckets = self.make(bucket_bytes)
        self.place = {p: number for number, bucket in enumerate(self.buckets) for p in bucket}
        self.active = True
        self.begin_anew()
        for parameter in self.place:
            parameter.register_post_accumulate_grad_hook(self.ready)

    def make(self, bucket_bytes):
        return buckets_in_one_loop(self.module.parameters(), bucket_bytes)

    def start_equal(self):
        broadcast(self.module)

    def forward(self, *inputs):
        return self.module(*inputs)

    def begin_anew(self):
        self.under_way = []
        self.missing = [set(bucket) for bucket in self.buckets]

    def ready(self, parameter):
        if self.active:
            self.missing[self.place[parameter]].discard(parameter)
            while len(self.under_way) < len(self.buckets) and not self.missing[len(self.under_way)]:
                self.start()

    def flat_of(self, bucket):
        return flatten_by_cat(bucket)

    def start(self):
        flat = self.flat_of(self.buckets[len(self.under_way)])
        self.under_way.append((flat, dist.all_reduce(flat, async_op=True)))

    def synchronize(self):
        while len(self.under_way) < len(self.buckets):
            self.start()
        for bucket, (flat, request) in zip(self.buckets, self.under_way, strict=True):
            request.wait()
            self.put_back(bucket, flat)
        self.begin_anew()

    def put_back(self, bucket, flat):
        unflatten_by_split(bucket, flat)

    @contextlib.contextmanager
    def no_sync(self):
        self.active = False
        try:
            yield
        finally:
            self.active = True


@own_ddp.accepted
class DDPWithCounters:
    """Not a Module; counts instead of sets, and tells in one further message a step which parameters are used."""

    def __init__(self, model, bucket_bytes):
        self.module, self.syncing = model, True
        state = [model.state_dict()]
        dist.broadcast_object_list(state, src=0)
        model.load_state_dict(state[0])
        self.buckets = buckets_by_dtype(model.parameters(), bucket_bytes)
        self.number = {id(p): k for k, bucket in enumerate(self.buckets) for p in bucket}
        self.reset()
        for bucket in self.buckets:
            for p in bucket:
                p.register_post_accumulate_grad_hook(self.hook)

    def reset(self):
        self.left = [len(bucket) for bucket in self.buckets]
        self.works = []

    def hook(self, p):
        if not self.syncing:
            return
        self.left[self.number[id(p)]] -= 1
        self.launch()

    def launch(self, everything=False):
        while len(self.works) < len(self.buckets) and (everything or self.left[len(self.works)] == 0):
            bucket = self.buckets[len(self.works)]
            flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in bucket])
            self.works.append((flat, dist.all_reduce(flat, op=dist.ReduceOp.SUM, async_op=True)))

    def __call__(self, *inputs, **more):
        return self.module(*inputs, **more)

    def synchronize(self):
        self.launch(everything=True)
        used = torch.tensor([float(p.grad is not None) for bucket in self.buckets for p in bucket])
        dist.all_reduce(used)
        used = iter(used.tolist())
        for bucket, (flat, work) in zip(self.buckets, self.works, strict=True):
            work.wait()
            flat /= dist.get_world_size()
            for p, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                p.grad = part.view_as(p) if next(used) else None
        self.reset()

    def no_sync(self):
        return Paused(self)


class Paused:
    def __init__(self, ddp):
        self.ddp = ddp

    def __enter__(self):
        self.ddp.syncing = False

    def __exit__(self, *_):
        self.ddp.syncing = True


@own_ddp.accepted
class DDPWithFutures(DDPAsInTheLesson):
    """Each request puts its bucket back through a future; what is late starts in a fixed order."""

    def start(self):
        bucket = self.buckets[len(self.under_way)]
        flat = self.flat_of(bucket)
        self.under_way.append((flat, dist.all_reduce(flat, async_op=True).get_future()))

    def synchronize(self):
        for _ in range(len(self.buckets) - len(self.under_way)):
            self.start()
        torch.futures.wait_all([future for _, future in self.under_way])
        for bucket, (flat, _) in zip(self.buckets, self.under_way, strict=True):
            unflatten_by_places(bucket, flat)
        self.begin_anew()


@own_ddp.rejected("start apart")
class DDPWithoutABroadcast(DDPAsInTheLesson):
    def start_equal(self):
        pass


@own_ddp.rejected("those of frozen parameters too")
class DDPThatBroadcastsWhatIsTrained(DDPAsInTheLesson):
    def start_equal(self):
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            if tensor.requires_grad or not isinstance(tensor, torch.nn.Parameter):
                dist.broadcast(tensor.data, 0)


@own_ddp.rejected("A buffer is no parameter")
class DDPThatForgetsBuffers(DDPAsInTheLesson):
    def start_equal(self):
        for p in self.module.parameters():
            dist.broadcast(p.data, 0)


@own_ddp.rejected("The gradients are summed")
class DDPThatSums(DDPAsInTheLesson):
    def flat_of(self, bucket):
        return flatten_by_cat(bucket) * dist.get_world_size()


@own_ddp.rejected("Divided twice")
class DDPThatDividesTwice(DDPAsInTheLesson):
    def put_back(self, bucket, flat):
        numbers = sum(p.numel() for p in bucket)
        flat[:numbers] /= dist.get_world_size()
        unflatten_by_split(bucket, flat)


@own_ddp.rejected("nothing has come from the others")
class DDPThatKeepsItsOwn(DDPAsInTheLesson):
    def put_back(self, bucket, flat):
        pass


@own_ddp.rejected("weight decay and momentum would move it")
class DDPWithZerosForNone(DDPAsInTheLesson):
    def put_back(self, bucket, flat):
        unflatten_to_zeros(bucket, flat)


@own_ddp.rejected("half-way")
class DDPAfterBackward(DDPAsInTheLesson):
    """All buckets, once backward is through."""

    def ready(self, parameter):
        pass


@own_ddp.rejected("half-way")
class DDPInOneBucket(DDPAsInTheLesson):
    def make(self, bucket_bytes):
        return one_bucket(self.module.parameters(), bucket_bytes)


class Done:
    def wait(self):
        return True


@own_ddp.rejected("holds backward up")
class DDPThatBlocksInItsHooks(DDPAsInTheLesson):
    def start(self):
        flat = self.flat_of(self.buckets[len(self.under_way)])
        dist.all_reduce(flat)
        self.under_way.append((flat, Done()))


@own_ddp.rejected("holds backward up")
class DDPThatWaitsInItsHooks(DDPAsInTheLesson):
    def start(self):
        super().start()
        self.under_way[-1][1].wait()


@own_ddp.rejected("counts no parameter as come")
class DDPThatCountsUnderNoSync(DDPAsInTheLesson):
    def ready(self, parameter):
        self.missing[self.place[parameter]].discard(parameter)
        if self.active:
            super().ready(parameter)


@own_ddp.rejected("A bucket is one message")
class DDPPerParameter(DDPAsInTheLesson):
    def make(self, bucket_bytes):
        return buckets_of_one(self.module.parameters(), bucket_bytes)


@own_ddp.rejected("Under no_sync nothing is sent")
class DDPWithANoSyncThatSyncs(DDPAsInTheLesson):
    """Right values, and a message in each backward."""

    @contextlib.contextmanager
    def no_sync(self):
        yield
        self.synchronize()


@own_ddp.rejected("belongs to the sum")
class DDPThatForgetsWhatAccumulated(DDPAsInTheLesson):
    @contextlib.contextmanager
    def no_sync(self):
        self.active = False
        yield
        self.active = True
        for p in self.module.parameters():
            p.grad = None


@own_ddp.rejected(state="stopped")
class DDPThatWaitsForWhatIsMissing(DDPAsInTheLesson):
    """Only buckets in which something has come: a rank that uses less sends less."""

    def synchronize(self):
        for number, (bucket, left) in enumerate(zip(self.buckets, self.missing, strict=True)):
            if number >= len(self.under_way):
                if len(left) == len(bucket):
                    self.under_way.append(None)
                    continue
                self.start()
            flat, request = self.under_way[number]
            request.wait()
            unflatten_by_split(bucket, flat)
        self.begin_anew()


@own_ddp.rejected(state="stopped")
class DDPInTheOrderOfArrival(DDPAsInTheLesson):
    """Starts whichever bucket is complete, and what is left at the end: ranks come to differ in the order."""

    def begin_anew(self):
        super().begin_anew()
        self.begun = {}

    def ready(self, parameter):
        if self.active:
            number = self.place[parameter]
            self.missing[number].discard(parameter)
            if not self.missing[number]:
                self.begin(number)

    def begin(self, number):
        flat = self.flat_of(self.buckets[number])
        self.begun[number] = (flat, dist.all_reduce(flat, async_op=True))

    def synchronize(self):
        for number in range(len(self.buckets)):
            if number not in self.begun:
                self.begin(number)
        for number, bucket in enumerate(self.buckets):
            flat, request = self.begun[number]
            request.wait()
            unflatten_by_split(bucket, flat)
        self.begin_anew()


# ---- accumulate


@accumulate.accepted
def accumulate_inside(ddp, batches):
    *first, (inputs, targets) = batches
    with ddp.no_sync():
        for some, wanted in first:
            (F.mse_loss(ddp(some), wanted) / len(batches)).backward()
    (F.mse_loss(ddp(inputs), targets) / len(batches)).backward()


@accumulate.accepted
def accumulate_with_a_null_context(ddp, batches):
    for number, (inputs, targets) in enumerate(batches, start=1):
        with ddp.no_sync() if number < len(batches) else contextlib.nullcontext():
            loss = F.mse_loss(ddp(inputs), targets) / len(batches)
            loss.backward()


@accumulate.accepted
def accumulate_by_a_stack(ddp, batches):
    """The context is entered once and left before the last."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(ddp.no_sync())
        for place, (inputs, targets) in enumerate(batches):
            if place == len(batches) - 1:
                stack.close()
            error = (ddp(inputs) - targets).pow(2).mean()
            (error / len(batches)).backward()


@accumulate.rejected("do not fit into memory")
def accumulate_as_one_loss(ddp, batches):
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    F.mse_loss(ddp(inputs), targets).backward()


@accumulate.rejected("do not fit into memory")
def accumulate_losses_for_one_backward(ddp, batches):
    with ddp.no_sync():
        losses = [F.mse_loss(ddp(inputs), targets) for inputs, targets in batches[:-1]]
    inputs, targets = batches[-1]
    (sum([*losses, F.mse_loss(ddp(inputs), targets)]) / len(batches)).backward()


@accumulate.rejected("DDP decides in *forward*")
def accumulate_with_the_forward_outside(ddp, batches):
    for number, (inputs, targets) in enumerate(batches, start=1):
        loss = F.mse_loss(ddp(inputs), targets) / len(batches)
        with ddp.no_sync() if number < len(batches) else contextlib.nullcontext():
            loss.backward()


@accumulate.rejected("one all-reduce in a step")
def accumulate_without_no_sync(ddp, batches):
    for inputs, targets in batches:
        (F.mse_loss(ddp(inputs), targets) / len(batches)).backward()


@accumulate.rejected("the last backward outside of no_sync")
def accumulate_and_never_sync(ddp, batches):
    with ddp.no_sync():
        accumulate_without_no_sync(ddp, batches)


@accumulate.rejected("divide each loss by their number")
def accumulate_the_sum(ddp, batches):
    accumulate_inside(ddp, batches)
    for p in ddp.parameters():
        p.grad *= len(batches)


@accumulate.rejected("None")
def accumulate_nothing(ddp, batches):
    pass


# ---- clipped_step


@clipped_step.accepted
def clip_after_synchronize(ddp, optimizer, loss, max_norm):
    optimizer.zero_grad()
    loss.backward()
    ddp.synchronize()
    torch.nn.utils.clip_grad_norm_(ddp.parameters(), max_norm)
    optimizer.step()


@clipped_step.accepted
def clip_and_clear_afterwards(ddp, optimizer, loss, max_norm):
    loss.backward()
    ddp.synchronize()
    torch.nn.utils.clip_grad_norm_(list(ddp.module.parameters()), max_norm=max_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


@clipped_step.accepted
def clip_by_hand(ddp, optimizer, loss, max_norm):
    ddp.module.zero_grad()
    loss.backward()
    ddp.synchronize()
    gradients = [p.grad for p in ddp.module.parameters() if p.grad is not None]
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    for gradient in gradients:
        gradient *= min(1.0, max_norm / (norm.item() + 1e-6))
    optimizer.step()


@clipped_step.rejected("clip when it is there")
def clip_before_synchronize(ddp, optimizer, loss, max_norm):
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(ddp.parameters(), max_norm)
    ddp.synchronize()
    optimizer.step()


@clipped_step.rejected("gradients that are not clipped")
def clip_after_the_step(ddp, optimizer, loss, max_norm):
    optimizer.zero_grad()
    loss.backward()
    ddp.synchronize()
    optimizer.step()
    torch.nn.utils.clip_grad_norm_(ddp.parameters(), max_norm)


@clipped_step.rejected("this rank's own gradient")
def clip_alone(ddp, optimizer, loss, max_norm):
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(ddp.parameters(), max_norm)
    optimizer.step()


@clipped_step.rejected("In this order")
def clip_each_value(ddp, optimizer, loss, max_norm):
    optimizer.zero_grad()
    loss.backward()
    ddp.synchronize()
    torch.nn.utils.clip_grad_value_(ddp.parameters(), max_norm)
    optimizer.step()


@clipped_step.rejected("one factor")
def clip_each_parameter(ddp, optimizer, loss, max_norm):
    optimizer.zero_grad()
    loss.backward()
    ddp.synchronize()
    for p in ddp.parameters():
        torch.nn.utils.clip_grad_norm_([p], max_norm)
    optimizer.step()


@clipped_step.rejected("clear the gradients")
def clip_without_clearing(ddp, optimizer, loss, max_norm):
    loss.backward()
    ddp.synchronize()
    torch.nn.utils.clip_grad_norm_(ddp.parameters(), max_norm)
    optimizer.step()


@clipped_step.rejected("Nothing has moved")
def clip_and_forget_the_step(ddp, optimizer, loss, max_norm):
    optimizer.zero_grad()
    loss.backward()
    ddp.synchronize()
    torch.nn.utils.clip_grad_norm_(ddp.parameters(), max_norm)
