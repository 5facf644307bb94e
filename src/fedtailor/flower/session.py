"""A method with one seed at a site: what its clients work out when they are asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from fnmatch import filter as matching
from functools import partial

from ..engine.client import ClientUpdate
from ..engine.config import Plan
from ..engine.executors.work import ClientRequest
from ..engine.joining import join_requests
from ..engine.participants import draw_cohort
from ..engine.prepare import Works
from ..errors import DivergedError, InputError, announce
from ..inference.onboard import RESULT_FILE, decide
from ..method import Server
from ..params import Params, add_prefix, strip_prefix, to_device
from ..store.files import write_json
from ..uploads.secure.link import reweighed
from ..uploads.secure.messages import Masks
from .messages import ClientReply, Kind, RoundRequest, WireRequest
from .schema import Form, any_size, check_form, form_of
from .states import States


@dataclass(frozen=True)
class Session:
    """A ``trial`` (run, label of a method, seed), ready to work; ``first`` has the clients' first
    states, ``server`` is the server's. ``basis`` names the settings and data that do not change
    while a run goes on."""

    trial: tuple[str, str, int]
    first: Callable[[int], Params]
    server: Server
    works: Works
    plan: Plan
    basis: str

    def received(self, kind: Kind, client: int) -> Form:
        """The form of what a client receives. Some sizes are any: a method may change a client's
        rank from round to round, or send what it has nothing of at first."""
        method, task = self.works.train.method, self.works.train.task
        shared = method.global_state(task, self.server) or {}
        if kind == "global":
            expected = shared
        elif kind == "join":
            received = add_prefix(method.send_new(task, self.server, client), "received/")
            expected = {**received, **add_prefix(shared, "global/")}
        else:
            expected = method.send(task, self.server, client)
        form = form_of(expected)
        changing = {name for pattern in method.changing_sizes for name in matching(form, pattern)}
        return form | any_size({name: form[name] for name in changing})

    @contextmanager
    def checked(self, kind: Kind, client: int, payload: Params) -> Iterator[Params]:
        """What a client has received, on the task's device, if it is of the method's form."""
        check_form("the payload", payload, self.received(kind, client))
        try:
            yield to_device(payload, self.works.train.task.device)
        except InputError:
            raise
        except (RuntimeError, ValueError, LookupError) as error:
            if not self.works.train.method.changing_sizes:
                raise
            raise InputError(
                f"the sizes of the payload's tensors don't go together: {type(error).__name__}"
            ) from error

    def _join(self, message: RoundRequest, client: int, payload: Params, states: States) -> str:
        """Fit a new client, keep its model and print what it scores; the name of the kept one."""
        received, shared = strip_prefix(payload, "received/"), strip_prefix(payload, "global/")
        training = self.works.train
        (request,) = join_requests(
            training.federation, training.local, [client], message.round,
            self.plan.evaluate.novel_passes or 1, self.first,
        )  # fmt: skip
        candidates = self.works.join.candidates(received, shared or None, request)
        result, state = decide(
            training, request, candidates, client=f"client-{client}", label=message.label
        )
        write_json(states.keep(client, state) / RESULT_FILE, asdict(result))
        print(result, flush=True)
        return result.kept

    def answer(
        self,
        message: RoundRequest,
        request: WireRequest,
        received: Params,
        states: States,
        masks: Masks | None = None,
    ) -> tuple[ClientReply, Params | None]:
        """What a client reports, and what it sends, with its ``masks``. Raises InputError where its
        private state is missing, or values are out of the range of masks, and DivergedError where
        it has trained to values that aren't finite."""
        if message.kind == "join":
            kept = self._join(message, request.client, received, states)
            return ClientReply(request.client, kept=kept), None
        if message.kind == "train":
            states.check(request.client, request.base, request.best, message.round)
        if message.kind == "global":
            return self._evaluated(message, request.client, received), None
        private = states.read(request.client, request.base, self.first(request.client))
        who = request.client, message.round, private  # its size doesn't matter
        if message.kind in ("personal", "keep"):
            passes = self.works.train.method.finetune_passes
            asked = ClientRequest(*who, "personalise", passes, 1.0, 0)
            state = self.works.evaluate.used(received, asked)
            if message.kind == "keep":
                states.keep(request.client, state)
                return ClientReply(request.client), None
            return self._evaluated(message, request.client, state), None
        training, clip = self.works.train, message.clip
        moves = training.chain.clip_now is not None
        if moves != (clip is not None) or not 0 < (clip or 1.0) <= 1e12:
            allowed = "above 0, to 1e12" if moves else "none, without privacy.clip_quantile"
            raise InputError(f"the server asks for the clip {clip}; allowed: {allowed}")
        rounds = range(message.round, message.round + 1)
        if training.method.trains_alone:
            turns = draw_cohort(training.method, training.federation, self.plan, message.round)
            rounds = turns.get(request.client, rounds)
        scale, slope = self.plan.lr_scale(rounds), self.plan.lr_slope(rounds)
        passes = training.local.passes
        if training.noise is not None:
            how = repr((training.noise, scale, slope, self.basis))
            states.spend(request.client, message.round, request.base, received, how)
        asked = ClientRequest(
            *who, "train", passes, scale, 0, lr_slope=slope, masks=masks, clip=clip
        )
        update: ClientUpdate = training.complete(asked, training.inputs(received, asked))
        if update.refusal is not None:
            reason, told = update.refusal.reason, update.refusal.told
            if told:
                announce(f"client {request.client}: {reason}")
            refused = DivergedError if update.refusal.diverged else InputError
            raise refused(told or reason)
        if update.unchanged:
            announce(
                f"{message.label}, seed {message.seed}, round {message.round}: {update.unchanged}; "
                "under [privacy] it sends that it changes nothing"
            )
        assert update.private is not None
        if update.kept is not None:
            states.write_update(request.client, update.kept)
        states.write(request.client, request.base, request.best, message.round, update.private)
        return ClientReply(request.client, loss=update.loss), update.packed

    def reweighed(
        self, client: int, mean: Params, states: States, masks: Masks | None
    ) -> tuple[ClientReply, Params]:
        """What a client sends in a second pass of secure aggregation, once it is told the mean."""
        training, upload = self.works.train, states.take_update(client)
        own_weight = partial(training.method.own_weight, training.task)
        if masks is None:
            raise InputError("there is no second pass without masks")
        check_form("the mean", mean, form_of(upload))
        largest = self.plan.secure_aggregation.range
        return ClientReply(client), reweighed(upload, mean, masks, own_weight, largest)

    def _evaluated(self, message: RoundRequest, client: int, state: Params) -> ClientReply:
        result = self.works.evaluate.scored(client, state, message.round)
        validation, test = result.sums.tolist()
        sums = (tuple(validation), tuple(test))
        return ClientReply(client, sums=sums, metrics=result.metrics)
