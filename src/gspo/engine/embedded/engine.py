"""The embedded engine: it decodes in the trainer's process, with the policy's own weights or with a copy."""

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch

from gspo.engine.embedded.cache import KeptPasts
from gspo.engine.embedded.decoding import Decoding, Means
from gspo.engine.embedded.proof import proven_means
from gspo.engine.engine import Completion, Prompt, Sampling, in_groups
from gspo.interrupt import check_stop
from gspo.loop import LOOK_SECONDS, have_waiter_do, in_thread
from gspo.model.lora import adapter_of, has_adapter
from gspo.model.parameters import live_tensors
from gspo.model.policy import Policy
from gspo.model.weights import weights_by_layer
from gspo.recipe.sections import AtPublish

_SLOW = {
    Means.NO_PADDING: "with prompts of one length at a time, for its cache is wrong beside padding",
    Means.NO_CACHE: "without a cache, slowly: all tokens are read again for each new one",
}


class _EndedError(Exception):
    """The engine is closed."""


class _GivenUpError(Exception):
    """Nobody waits for the completions under way."""


@dataclass(kw_only=True, eq=False)
class _Request:
    prompts: Sequence[Prompt]
    sampling: Sampling
    futures: list[Future[Completion]]


@dataclass(kw_only=True, eq=False)
class _Update:
    """New weights, which the decoding thread takes between two tokens."""

    version: int
    replace: Callable[[], None]
    done: Future[None] = field(default_factory=Future)


class _Decoder:
    """A decoder of requests: those sampled alike side by side, in the order in which they come."""

    def __init__(self, policy: Policy, *, max_rows: int, at_publish: AtPublish, means: Means) -> None:
        self._policy, self._max_rows, self._at_publish, self._means = policy, max_rows, at_publish, means
        self.queue: SimpleQueue[list[_Request] | _Update | None] = SimpleQueue()  # None: the end
        self.version = 0
        self.kept = KeptPasts()  # of prompts that responses under way may go on with
        self._num_tokens = 0  # before the decoding under way
        self._decoding: Decoding | None = None
        self._futures: list[Future[Completion]] = []  # of the decoding under way
        self._requests: list[_Request] = []  # that wait
        self._updates: list[_Update] = []  # that wait for the end of the completions under way
        self._look_about: Callable[[], object] = lambda: None  # before each token
        self._lock = threading.Lock()

    @property
    def num_tokens(self) -> int:
        """The number of tokens sampled so far."""
        decoding = self._decoding
        return self._num_tokens + (decoding.num_tokens if decoding is not None else 0)

    def run(self) -> None:
        """Work until the end, in a thread of its own."""
        with suppress(_EndedError), self._cancelling():
            while True:
                self._take(self.queue.get())
                self._complete_all()

    def run_once(self, look_about: Callable[[], object] = lambda: None) -> None:
        """Complete what waits, in the thread of whoever waits for it; what `look_about` raises gives that up."""
        with self._lock, suppress(_EndedError), self._cancelling():
            self._look_about = look_about
            self._take_in()
            self._complete_all()

    @contextmanager
    def _cancelling(self) -> Iterator[None]:
        """A context that gives up all requests where it is left by an error."""
        device = self._policy.head.weight.device
        if device.type == "cuda":
            torch.cuda.set_device(device)  # a thread has its own
        try:
            yield
        except BaseException:
            for future in [*self._futures, *(future for request in self._requests for future in request.futures)]:
                future.cancel()
            self._requests, self._futures = [], []
            raise

    def _complete_all(self) -> None:
        while self._requests:
            self._complete(self._next_requests())
            for update in self._updates:
                self._replace_weights(update)
            self._updates = []

    def _take(self, item: list[_Request] | _Update | None) -> None:
        if item is None:
            raise _EndedError
        if isinstance(item, list):
            self._requests += [request for request in item if not all(future.done() for future in request.futures)]
        elif self._decoding is not None and self._at_publish == "wait":
            self._updates.append(item)
        else:
            self._replace_weights(item)

    def _replace_weights(self, update: _Update) -> None:
        if not update.done.set_running_or_notify_cancel():
            return
        try:
            update.replace()
        except BaseException as error:
            update.done.set_exception(error)
            return
        self.version = update.version
        if self._at_publish != "keep":
            self.kept.clear()
        if self._decoding is not None:
            self._decoding.change_weights(update.version, keep_cache=self._at_publish == "keep")
        update.done.set_result(None)

    def _take_in(self) -> None:
        while not self.queue.empty():
            self._take(self.queue.get())

    def _look(self) -> None:
        """Take in what has come, before each token."""
        self._look_about()
        self._take_in()
        if all(future.done() for future in self._futures):
            raise _GivenUpError

    def _next_requests(self) -> list[_Request]:
        """The first that waits, and those sampled alike that find room beside it."""
        first, room, taken = self._requests[0], self._max_rows, list[_Request]()
        for request in self._requests:
            if request is first or (request.sampling == first.sampling and len(request.prompts) <= room):
                room -= len(request.prompts)
                taken.append(request)
        self._requests = [request for request in self._requests if request not in taken]
        return taken

    def _complete(self, requests: Sequence[_Request]) -> None:
        futures = self._futures = [future for request in requests for future in request.futures]

        def put(number: int, completion: Completion) -> None:
            with suppress(InvalidStateError):  # it is given up
                futures[number].set_result(completion)

        try:
            self._decoding = Decoding(
                policy=self._policy,
                prompts=[prompt for request in requests for prompt in request.prompts],
                sampling=requests[0].sampling,
                max_rows=self._max_rows,
                version=self.version,
                check=self._look,
                put=put,
                means=self._means,
                kept=self.kept,
            )
            with torch.inference_mode():
                self._decoding.generate()
        except _EndedError:
            raise
        except _GivenUpError:
            pass
        except Exception as error:  # such as too little memory
            for future in futures:
                with suppress(InvalidStateError):
                    future.set_exception(error)
        finally:
            self._num_tokens, self._decoding = self.num_tokens, None
        self._futures = []


class EmbeddedEngine:
    """An engine in the trainer's process.

    Without a copy it samples from what the policy has learned so far, in the thread that waits in `loop.run` for the
    coroutine that submits. With a copy it samples in a thread of its own, while the policy is trained.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        max_rows: int = 512,
        copy: Policy | None = None,
        at_publish: AtPublish = "none",
        num_threads: int | None = None,
    ) -> None:
        """Give the trainer and the engine `num_threads` of the cores each, until the engine is closed."""
        self._policy, self._copy = policy, copy
        self._threads_before, self._num_threads = torch.get_num_threads(), num_threads
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        own = copy or policy
        with torch.inference_mode():
            self._means = proven_means(own)
        self._waits = at_publish == "wait"
        self._decoder = _Decoder(own, max_rows=max_rows, at_publish=at_publish, means=self._means)
        self._published: int | None = None
        self._thread: Future[None] | None = None  # done once it has ended
        self._end = weakref.finalize(self, self._decoder.queue.put, None)

    @property
    def num_tokens(self) -> int:
        """The number of tokens sampled so far."""
        return self._decoder.num_tokens

    def submit(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Future[Completion]]:
        """Have the prompts continued, as Engine has it: those of one call are decoded side by side."""
        futures = [Future[Completion]() for _ in prompts]
        # What weights wait for is no more than fits into max_rows.
        parts = in_groups(prompts) if self._waits or not prompts else [range(len(prompts))]
        requests = [
            _Request(prompts=[prompts[n] for n in part], sampling=sampling, futures=[futures[n] for n in part])
            for part in parts
        ]
        if not self._end.alive or (self._thread is not None and self._thread.done()):
            raise RuntimeError("the engine is closed")
        self._decoder.queue.put(requests)
        if self._copy is None:
            have_waiter_do(self._decoder.run_once)
        elif self._thread is None:
            self._thread = in_thread("decoding", self._decoder.run)
        return futures

    def publish(self, version: int) -> None:
        """Give the copy the policy's present weights, between two tokens; without one, note the version.

        Stopped where a signal comes while it waits for the completions under way.
        """
        if version == self._published:
            return
        if self._copy is None or self._thread is None:
            self._replace_weights()
            self._decoder.version = version
            self._decoder.kept.clear()
        else:
            update = _Update(version=version, replace=self._replace_weights)
            self._decoder.queue.put(update)
            try:
                while not (update.done.running() or wait([update.done], LOOK_SECONDS).done):
                    check_stop()
            except BaseException:
                if not update.done.cancel():  # it has begun
                    wait([update.done])
                raise
            update.done.result()
        self._published = version

    @torch.inference_mode(False)
    @torch.no_grad()
    def _replace_weights(self) -> None:
        if self._copy is None:
            return
        if has_adapter(self._copy.model):  # merged into half precision, small steps of it would be rounded away
            own = adapter_of(self._policy.model)
            for name, parameter in adapter_of(self._copy.model).items():
                parameter.copy_(own[name])
            return
        copies = dict(live_tensors(self._copy.model))
        missing = {id(tensor) for tensor in copies.values()}  # tied ones are one
        for layer in weights_by_layer(self._policy, as_saved=False):
            for name, tensor in layer.items():
                copies[name].copy_(tensor)
                missing.discard(id(copies[name]))
        assert not missing, "the copy has tensors that the policy lacks"

    def describe(self) -> Mapping[str, str]:
        """Say by which means tokens are decoded: the fast decoder rounds in its own way."""
        slow = {"decoding": _SLOW[self._means]} if self._means in _SLOW else {}
        return {"engine": "embedded", "decoder written out": str(self._means is Means.FAST), **slow}

    def take_metrics(self) -> Mapping[str, float]:
        """Return nothing: there is no server to fail."""
        return {}

    def close(self) -> None:
        """End the thread, and give up what is under way."""
        self._end()
        if self._thread is not None:
            wait([self._thread])
        else:
            self._decoder.run_once()
        if self._num_threads is not None:
            torch.set_num_threads(self._threads_before)
