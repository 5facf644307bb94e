"""Whether a method, its settings, a plan and a federation go together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..data.federation import Federation
from ..errors import InputError, listed
from ..method import Method
from ..objectives import OBJECTIVES
from ..params import DRAWN
from ..task.task import Task
from ..uploads.secure.fixed_point import LEAST_NOISE, FixedPoint
from .config import CohortConfig, Plan
from .executors.processes import check_processes
from .forms import check_plain_hooks
from .prepare import blank_batch, blank_upload, first_server, first_steps, upload_chain


def check(method: Method, task: Task, federation: Federation, plan: Plan) -> None:
    """Raise InputError where the method, its settings and the federation don't go together."""
    check_plan(method, federation, plan, task.device)
    check_plain_hooks(method, task)
    if plan.local.micro_batch is not None and task.mixes_examples:
        raise InputError(
            f"local.micro_batch = {plan.local.micro_batch}: the model's batch normalisation needs "
            "whole batches; leave it out, or set model.batch_norm = 'frozen'"
        )
    cohort_size = plan.cohort_size(federation)
    method.check(task, federation.num_clients, cohort_size, plan.rounds)
    hides = plan.privacy.of_clients or plan.secure_aggregation.is_active
    if hides and not method.trains_alone:
        _check_releases(method, task, federation, plan)
    if plan.privacy.of_records and not method.trains_alone:
        _check_steps(method, task, federation, plan)


def _check_steps(method: Method, task: Task, federation: Federation, plan: Plan) -> None:
    """Raise InputError where noise in steps can't cover all that a method makes of examples: it
    trains on one batch, whose examples it can't see."""
    if task.mixes_examples:
        raise InputError(
            "privacy.level = 'record': under the model's batch normalisation an example changes "
            "the gradients of others; set model.batch_norm = 'frozen'"
        )
    works, server, request = first_steps(method, task, federation, plan)
    received = method.send(task, server, request.client)
    batch = {**blank_batch(federation.dataset), DRAWN: torch.ones(2)}
    works.train.complete(request, works.train.inputs(received, request, [batch]))


def _check_releases(method: Method, task: Task, federation: Federation, plan: Plan) -> None:
    """Raise InputError where the mean of updates is not all that clients send, as an upload of
    blank examples shows."""
    noised, section = plan.privacy.of_clients, "secure_aggregation"
    why = "the server sees sums alone"
    if noised:
        section, why = "privacy", "noise covers the mean of updates alone"
    chain = upload_chain(method, task, federation, plan.in_clear)
    upload, _ = blank_upload(method, task, federation, chain)
    covered = chain.context.updates(upload)
    buffers = tuple(task.buffers) if noised else ()
    if buffers and (statistics := sorted(name for name in upload if name.endswith(buffers))):
        raise InputError(
            f"privacy: {method.name} sends running statistics ({listed(statistics, few=2)}), which "
            "noise would spoil; set model.batch_norm = 'frozen'"
        )
    if not noised:  # their mean is what the server takes without masks, too
        covered = {name: value for name, value in upload.items() if value.is_floating_point()}
    weighs = method.weighs_by_mean and method.sends_updates and not noised
    if (method.averages or weighs) and covered.keys() == upload.keys():
        return
    known = {*task.state, *(covered.keys() & first_server(method, task, federation))}
    beside = sorted(name for name in upload if name not in known)
    sent = f"; beside the update it sends {listed(beside, few=3)}" if beside else ""
    leave = "Set aggregation to uniform, or leave" if method.weighs_by_mean else "Leave"
    what = f"needs each client's own upload, and {why}{sent}"
    if noised and method.released:
        what = f"releases {method.released}, and {why}"
    raise InputError(
        f"{section}: {method.name} as configured {what}. {leave} the method or [{section}] out"
    )


def check_attack(federation: Federation, plan: Plan) -> None:
    """Raise InputError where the attack doesn't go with the federation."""
    plan.attack.check(
        federation.num_clients,
        federation.dataset.num_classes,
        rounds=plan.rounds,
        batch_size=plan.local.batch_size,
    )
    if plan.attack.kind == "none":
        return
    if federation.remote:
        raise InputError(
            f"attack.kind = {plan.attack.kind!r}: attacks are simulated in one process, not over "
            "Flower; leave [attack] out"
        )
    if plan.attack.on_data and federation.dataset.class_numbers is None:
        raise InputError(
            f"attack.kind = {plan.attack.kind!r}, but the data have no labels; "
            "choose a kind that changes updates instead"
        )
    if plan.attackers(federation) <= federation.novel(plan.cohort.novel):
        raise InputError(
            f"attack: all attackers are among the {plan.cohort.novel} clients of cohort.novel, "
            "which never take part; name others in attack.clients"
        )
    if not plan.evaluated(federation):
        raise InputError("attack: all evaluated clients attack; lower attack.fraction")


def check_faults(method: Method, federation: Federation, plan: Plan, taking_part: int) -> None:
    """Raise InputError where simulated faults, or asynchronous aggregation, don't go with the
    federation or the method."""
    plan.faults.check(federation.num_clients)
    if federation.remote and plan.faults.is_active:
        raise InputError("faults are simulated in one process, not over Flower; leave [faults] out")
    buffer = plan.cohort.buffer
    if buffer is None:
        return
    if federation.remote:
        raise InputError(
            f"cohort.buffer = {buffer}: asynchronous aggregation is simulated in one process, not "
            "over Flower"
        )
    if not plan.faults.machines:
        raise InputError(
            f"cohort.buffer = {buffer} needs to know how fast clients are: add [[faults.machines]]"
        )
    if buffer > taking_part:
        raise InputError(
            f"cohort.buffer = {buffer} is more than the {taking_part} clients that take part"
        )
    if not method.needs_only_mean:
        raise InputError(
            f"cohort.buffer = {buffer} is for methods that average; {method.name} needs each "
            "client's upload of the same round. Leave cohort.buffer out for it"
        )


def check_privacy(method: Method, federation: Federation, plan: Plan) -> None:
    """Raise InputError where the plan would spend more than the account of its privacy says."""
    if not plan.privacy.is_active:
        return
    if federation.remote and not plan.privacy.secret:
        raise InputError(
            "privacy.secret = false: the noise would follow from the seed, which the sites and the "
            "server know; set privacy.secret = true"
        )
    if plan.privacy.of_records:
        _check_record_privacy(method, plan)
    else:
        _check_client_privacy(method, plan)
    plan.account(federation)


def _check_record_privacy(method: Method, plan: Plan) -> None:
    local = plan.local
    reasons = {
        "cohort.buffer": (plan.cohort.buffer is not None, "clients may train more often"),
        "local.class_weights": (local.class_weights is not None, "they depend on all examples"),
        "local.pack": (local.pack, "examples share rows, and each needs a gradient of its own"),
        f"methods.{method.name}": (
            not method.takes_parts, "an example changes the gradients of others"
        ),
    }  # fmt: skip
    _refuse(reasons, "privacy.level = 'record'")


def _check_client_privacy(method: Method, plan: Plan) -> None:
    cohort = plan.cohort
    reasons = {
        "cohort.buffer": (cohort.buffer is not None, "cohorts are not drawn at random"),
        "cohort.max_share": (cohort.max_share is not None, "all clients have the same share"),
        "attack.kind": (plan.attack.on_uploads, "what attackers send would not be clipped"),
        "robust": (method.robust.is_active, "a rule looks at uploads before there is noise"),
        **dict.fromkeys(_changed_bounds(cohort), (True, "privacy.clip bounds each update")),
    }  # fmt: skip
    _refuse(reasons, "[privacy]")
    if plan.privacy.by_clients and not plan.secure_aggregation.is_active:
        raise InputError(
            "privacy.noise_by = 'clients': without masks the server would see each client's update "
            "with a small part of the noise; add [secure_aggregation], or let the server add noise"
        )


def _refuse(reasons: Mapping[str, tuple[bool, str]], setting: str) -> None:
    for name, (is_set, why) in reasons.items():
        if is_set:
            raise InputError(f"{name} does not go with {setting}: {why}; leave one of them out")


_LEAST_STEPS = 10_000  # of whole numbers, in the norm of an update: one in each of 10^8 values


def check_secure_aggregation(method: Method, federation: Federation, plan: Plan) -> None:
    """Raise InputError where the plan needs more of uploads than their sum."""
    secure, clip, size = plan.secure_aggregation, plan.privacy.bound, plan.cohort_size(federation)
    if not secure.is_active:
        return
    single = "nobody sees single uploads"
    kept = "cohort.above_norm" if plan.cohort.above_norm == "keep" else None
    reasons = {
        "cohort.buffer": (plan.cohort.buffer is not None, "those who mask together train together"),
        "attack.kind": (plan.attack.on_uploads, f"it is worked out from all uploads, and {single}"),
        "robust": (method.robust.is_active, single),
        "cohort.max_share": (
            plan.cohort.max_share is not None and method.weighs_by_mean,
            f"nobody sees the clients' own weights under {method.name}",
        ),
        **{name: (True, single) for name in _changed_bounds(plan.cohort) if name != kept},
    }
    _refuse(reasons, "[secure_aggregation]")
    if size < 2:
        raise InputError(f"secure_aggregation needs a cohort of two clients or more; it has {size}")
    secure.check_neighbours(size)
    if plan.privacy.of_clients and clip > secure.range:
        raise InputError(
            f"secure_aggregation.range = {secure.range:g} is less than privacy.clip = {clip:g}: "
            "which clients send nothing would tell of their data; set a range of at least the clip"
        )
    if plan.privacy.of_clients and clip / size < _LEAST_STEPS * FixedPoint(secure.range, size).step:
        raise InputError(
            f"privacy.clip = {clip:g} is too small for secure_aggregation.range = "
            f"{secure.range:g}: an update would have fewer than {_LEAST_STEPS:,} steps of whole "
            "numbers in all, and be rounded to nothing; lower the range towards the clip"
        )
    if account := plan.account(federation) if plan.privacy.by_clients else None:
        numbers = FixedPoint(secure.range, size, account.noise * clip, secure.least(size))
        if (steps := numbers.noise_steps(1 / size)) < LEAST_NOISE:
            raise InputError(
                f"privacy.noise_by = 'clients': a client's noise has a standard deviation of "
                f"{steps:.3g} steps of whole numbers, and at least {LEAST_NOISE} are needed; lower "
                f"secure_aggregation.range, now {secure.range:g}, towards privacy.clip = {clip:g}"
            )


def _changed_bounds(cohort: CohortConfig) -> list[str]:
    """The settings of a bound on norms that are not the usual ones."""
    usual, names = CohortConfig(), ("above_norm", "max_norm", "norm_factor", "norm_quantile")
    return [f"cohort.{name}" for name in names if getattr(cohort, name) != getattr(usual, name)]


def check_plan(method: Method, federation: Federation, plan: Plan, device: torch.device) -> None:
    """The part of `check` that needs no model."""
    taking_part = federation.num_clients - plan.cohort.novel
    if taking_part < 1:
        raise InputError(
            f"cohort.novel = {plan.cohort.novel} leaves none of {federation.num_clients} clients "
            f"to take part; allowed: 0 to {federation.num_clients - 1}"
        )
    plan = plan.alone if method.trains_alone else plan
    cohort_size = plan.cohort_size(federation)
    uploads = min(cohort_size, plan.cohort.buffer or cohort_size)
    max_share = plan.cohort.max_share
    if max_share is not None and max_share * uploads < 0.99:  # 0.333 of three will do
        raise InputError(
            f"cohort.max_share = {max_share}: of the {uploads} clients whose uploads a round has, "
            f"one has a share of at least 1/{uploads}; allowed: {1 / uploads:.3g} (all count "
            "alike) to 1"
        )
    if plan.engine.executor == "processes":
        check_processes(device)
    method.robust.check(uploads)
    method.robust.check_method(
        method.name, needs_only_mean=method.needs_only_mean, sends_updates=method.sends_updates
    )
    can_clip = method.needs_only_mean or method.sends_updates
    if plan.cohort.above_norm == "clip" and not can_clip:
        raise InputError(
            "cohort.above_norm = 'clip' needs uploads that can be compared with the server's "
            f"state; those of {method.name} can't; allowed: 'refuse', 'keep'"
        )
    check_privacy(method, federation, plan)
    check_secure_aggregation(method, federation, plan)
    check_attack(federation, plan)
    check_faults(method, federation, plan, taking_part)
    if plan.local.batch_size < method.min_batch_size:
        raise InputError(
            f"{method.name} does not train on batches of fewer than {method.min_batch_size} "
            f"examples; local.batch_size is {plan.local.batch_size}"
        )
    objective = federation.dataset.objective
    if plan.local.class_weights and not objective.has_classes:
        raise InputError(
            f"local.class_weights = {plan.local.class_weights!r} needs one class a row, and the "
            f"task {objective.name!r} has none; leave it out"
        )
    if plan.local.micro_batch is not None and not method.takes_parts:
        raise InputError(
            f"local.micro_batch = {plan.local.micro_batch}: a step of {method.name} needs its "
            "whole batch; leave local.micro_batch out"
        )
    if plan.local.pack and not objective.packs:
        able = ", ".join(name for name, one in OBJECTIVES.items() if one.packs)
        raise InputError(
            f"local.pack = true: examples of the task {objective.name!r} can't share a row of "
            f"tokens; tasks that can: {able}"
        )
    if plan.engine.checkpointing and not method.takes_checkpointing:
        raise InputError(
            f"engine.checkpointing = true: {method.name} remembers what is computed inside the "
            "model's blocks; leave engine.checkpointing out"
        )
    if method.needs_public and federation.public is None:
        raise InputError(f"{method.name} needs public examples; name a data set in [public]")
    if method.needs_public_labels:
        _check_public_labels(method, federation)
    method.check_settings(federation.num_clients, cohort_size, plan.rounds)


def _check_public_labels(method: Method, federation: Federation) -> None:
    public, clients_data = federation.public, federation.dataset
    classes = () if public is None or public.class_numbers is None else public.classes
    if not classes or list(classes) != list(clients_data.classes):
        raise InputError(
            f"{method.name} as configured trains on the public examples' labels: their classes "
            f"({_listed(classes)}) must be the clients' ({_listed(clients_data.classes)})"
        )


def _listed(classes: Sequence[str]) -> str:
    more = f", ... {len(classes)} in all" if len(classes) > 5 else ""
    return ", ".join(classes[:5]) + more if classes else "none"
