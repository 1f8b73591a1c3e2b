"""`colocated.journal`: opened before a program runs, committed as it goes."""

import contextlib
import dataclasses
import os
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeVar

from partjit.checks import require, require_callable, require_flag, require_path, require_text
from partjit.colocated.agreement.waiting import LOOK_SECONDS, wait_or_gone
from partjit.colocated.journaling import log as active
from partjit.colocated.journaling.contents import Contents, JournaledCall
from partjit.colocated.journaling.directory import (
    Manifest,
    lock,
    log_file,
    log_records,
    read_manifest,
    remove_others,
    write_manifest,
)
from partjit.colocated.journaling.durable import Checksum, checked, sync_directory, write
from partjit.colocated.journaling.identity import current_scope
from partjit.colocated.journaling.objects import Kept, kept, own_state, saved
from partjit.colocated.journaling.opened import Opened, log_of, refuse_second, restored_state
from partjit.colocated.journaling.processes import Group, UndecidedError
from partjit.colocated.journaling.records import RecordFile
from partjit.colocated.journaling.state import write_state
from partjit.colocated.runtime.history import History
from partjit.colocated.runtime.streams import join, wait
from partjit.errors import JournalError

__all__ = ["Journal", "journal"]

_State = TypeVar("_State")
_Repartition = Callable[[str, Sequence[Any]], Any]


class Journal(contextlib.AbstractContextManager["Journal", None]):
    """What `journal` returns: it is open in its `with` block."""

    def __init__(
        self, path: str, objects: Mapping[str, object], results: bool, repartition: _Repartition | None
    ) -> None:
        self._path = path
        self._given = dict(objects)
        self._results = results
        self._repartition = repartition
        self._objects: dict[str, Kept] = {}
        self._names: dict[History, str] = {}
        self._attempts = 0
        self._open: Opened | None = None

    def __enter__(self) -> Self:
        refuse_second("colocated.journal")
        group = Group(self._path)
        held: list[int] = []
        try:
            found = group.decide(
                lambda: self._locked(group, held), lambda _: self._prepared(group), "opening a journal"
            )
            manifest = Manifest.from_json(found)
            file = log_file(self._path, manifest, group.process)
        except BaseException:
            for descriptor in held:
                os.close(descriptor)
            raise
        log = log_of(manifest, group.process, file, file.found, self._names)
        opened = self._open = Opened(group, held[0], manifest, file, log)
        self._committed = self._read_objects()
        self._latest = log.states(file.found) if self._results else {}
        try:
            for name, value in self._given.items():
                self.register(name, value)
            if not manifest.files:  # what a restart before the first commit goes back to
                self._commit(None, 0)
        except BaseException:
            self._close()
            raise
        active.set_current(opened.log)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                wait()
            else:  # calls that wait for devices of a process that is gone may never end
                wait_or_gone(lambda: not join(None, time.monotonic() + LOOK_SECONDS), self._opened.group.gone)
        finally:
            active.set_current(None)
            self._close()

    def _close(self) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            opened.file.close()
            os.close(opened.lock)

    @property
    def _opened(self) -> "Opened":
        if self._open is None:
            raise JournalError(f"the journal {self._path} is not open: use it in its with block")
        return self._open

    @property
    def commits(self) -> int:
        """The number of the last commit; 0 if there is none.

        Example:
            >>> import tempfile
            >>> from partjit import colocated
            >>> with tempfile.TemporaryDirectory() as path, colocated.journal(path) as journal:
            ...     journal.commit()
            ...     journal.commits
            1
        """
        return self._opened.manifest.commit

    @property
    def calls(self) -> tuple[JournaledCall, ...]:
        """The calls of this process since the last commit that have ended, in the order in which they did.

        Example:
            >>> import tempfile
            >>> import jax.numpy as jnp
            >>> from partjit import colocated
            >>> double = colocated.colocated_python(lambda x: 2 * x, mode="inline")
            >>> with tempfile.TemporaryDirectory() as path, colocated.journal(path) as journal:
            ...     _ = double(jnp.float32(1))
            ...     [call.path for call in journal.calls]
            ['<lambda>:0']
        """
        opened = self._opened
        return Contents(log_records(self._path, opened.manifest, opened.group.process)).listed()

    def register(self, name: str, value: object) -> None:
        """Names an object whose state is committed from now on, and restores what was committed of it.

        Args:
            name: the same after every restart.
            value: a colocated object of a class with a `state`; or another object, with methods `save()`, which
                returns the state, to be pickled, and `restore(state)`.

        Raises:
            TypeError: it is neither.
            ValueError: it is a colocated object without a state, or the name is taken.
            JournalError: the state cannot be read; or the processes are not as many as committed, their states
                differ, and there is no `repartition`.

        Example:
            >>> import tempfile
            >>> from partjit import colocated
            >>> class Position:
            ...     def __init__(self):
            ...         self.value = 0
            ...     def save(self):
            ...         return self.value
            ...     def restore(self, value):
            ...         self.value = value
            >>> with tempfile.TemporaryDirectory() as path:
            ...     with colocated.journal(path, objects={"position": (position := Position())}) as journal:
            ...         position.value = 5
            ...         journal.commit()
            ...     with colocated.journal(path) as journal:
            ...         journal.register("position", position := Position())
            >>> position.value
            5
        """
        opened = self._opened
        require_text("Journal.register", "name", name, "a name that is the same after every restart")
        if name in self._objects:
            raise ValueError(f"Journal.register: there is an object of the name {name!r} already")
        saving, history = kept(name, value)
        if name in self._latest:
            saving.restore(self._latest[name])
        elif states := [own[name] for own in self._committed if name in own]:
            group = opened.group
            saving.restore(own_state(name, states, group.process, group.count, self._repartition))
        self._objects[name] = saving
        if history is not None:
            self._names[history] = name

    def restore(self, like: _State) -> _State:
        """The state of the program in the last commit.

        Args:
            like: a tree of arrays, of `jax.ShapeDtypeStruct`s, or of numbers. The result has its structure and its
                shardings, which may be of another mesh, and of other processes, than those that committed.

        Returns:
            The state; `like` itself if there is no commit yet.

        Raises:
            JournalError: the state has another structure, shape or dtype, is damaged, or there is none in the commit.

        Example:
            >>> import tempfile
            >>> import jax.numpy as jnp
            >>> from partjit import colocated
            >>> initial = {"step": 0, "params": jnp.zeros(2)}
            >>> with tempfile.TemporaryDirectory() as path:
            ...     with colocated.journal(path) as journal:
            ...         journal.commit({"step": 3, "params": jnp.ones(2)})
            ...     with colocated.journal(path) as journal:
            ...         journal.restore(initial)
            {'params': Array([1., 1.], dtype=float32), 'step': 3}
        """
        return restored_state(self._path, self._opened.manifest, like)

    def commit(self, state: Any = None) -> None:
        """Commits the calls made so far, the state of the program and those of the objects: all of them or nothing.

        It waits for the calls made so far. When it returns, what is committed survives the end of the machine. All
        processes call it at the same point, between their programs.

        Args:
            state: a tree of arrays and numbers, with what the program needs to go on, as the number of the step. Of
                arrays over several processes each writes its shards; everything else is that of the first process.

        Raises:
            Exception: what a call has raised, or what prevents this process from writing. Nothing is committed.
            OtherProcessError: that was raised in another process.
            JournalError: it is called inside of a program or call, or the state of an object would be lost, which was
                committed before a restart and which has not been named since.

        Example:
            >>> import tempfile
            >>> from partjit import colocated
            >>> with tempfile.TemporaryDirectory() as path, colocated.journal(path) as journal:
            ...     journal.commit({"step": 1})
        """
        if current_scope.get() is not None:
            raise JournalError("Journal.commit was called inside of a program or call: commit when it has returned")
        self._commit(state, self._opened.manifest.commit + 1)

    def _commit(self, state: Any, number: int) -> None:
        opened = self._opened
        self._attempts += 1
        group, before = opened.group, opened.manifest
        following = dataclasses.replace(
            before,
            commit=number,
            directory=f"{number:08}-{before.epoch}-{self._attempts}",
            has_state=state is not None,
        )
        files: list[RecordFile] = []

        def decided(found: list[Any]) -> Any:
            checksums = tuple({name: Checksum(*each) for name, each in own.items()} for own in found)
            manifest = dataclasses.replace(following, files=checksums)
            write_manifest(self._path, manifest)
            return manifest.to_json()

        try:
            data = group.decide(lambda: self._written(following, group, state, files), decided, "Journal.commit")
        except BaseException as error:
            for file in files:
                file.close()
            if not isinstance(error, Exception) or isinstance(error, UndecidedError):
                opened.file.close()  # whether it is committed is known after a restart only
            raise
        opened.log.end()
        opened.file.close()
        opened.manifest, opened.file = Manifest.from_json(data), files[0]
        opened.log = log_of(opened.manifest, group.process, files[0], [], self._names)
        if active.current is not None:
            active.set_current(opened.log)
        if group.process == 0:
            remove_others(self._path, opened.manifest)

    def _written(self, manifest: Manifest, group: Group, state: Any, files: list[RecordFile]) -> dict[str, Checksum]:
        """Writes what this process has of a commit."""
        lost = sorted(set.intersection(*map(set, self._committed)) - {*self._objects}) if self._committed else ()
        if lost:
            raise JournalError(
                f"Journal.commit: the journal has the state of an object named {lost[0]!r}, and none has this name "
                "now, so it would be lost: name the object, as in colocated.journal(path, objects="
                f"{{{lost[0]!r}: object}}), or begin a journal in another directory"
            )
        wait()
        os.makedirs(os.path.join(self._path, manifest.directory), exist_ok=True)
        names = {f"objects-{group.process}": pickle.dumps(saved(self._objects))}
        found = {name: write(manifest.file(self._path, name), data) for name, data in names.items()}
        if manifest.has_state:
            name = f"state-{group.process}"
            found[name] = write_state(manifest.file(self._path, name), state, group.process)
        files.append(log_file(self._path, manifest, group.process))
        sync_directory(os.path.join(self._path, manifest.directory))
        return found

    def _locked(self, group: Group, held: list[int]) -> None:
        os.makedirs(self._path, exist_ok=True)
        held.append(lock(self._path, group.process))

    def _prepared(self, group: Group) -> dict[str, Any]:
        """What the first process finds, or begins."""
        found = read_manifest(self._path)
        manifest = found or Manifest.new(group.count, self._results)
        is_played = self._results and (manifest.processes, manifest.results) == (group.count, True)
        if found is not None and not is_played:
            manifest = manifest.in_new_epoch(group.count, self._results)
        if manifest is not found:
            write_manifest(self._path, manifest)
        remove_others(self._path, manifest)
        return manifest.to_json()

    def _read_objects(self) -> list[dict[str, bytes]]:
        """The states of the objects, of each process that committed."""
        manifest = self._opened.manifest
        return [
            pickle.loads(checked(manifest.file(self._path, name), checksum))
            for own in manifest.files
            for name, checksum in own.items()
            if name.startswith("objects-")
        ]

    def __repr__(self) -> str:
        return f"<journal {self._path}, {'open' if self._open else 'closed'}>"


def journal(
    path: str | os.PathLike[str],
    *,
    objects: Mapping[str, object] | None = None,
    results: bool = False,
    repartition: _Repartition | None = None,
) -> Journal:
    """Records which colocated calls have been made, and commits them together with the state of the program.

    After the process was killed, the same program, started again with the same path, goes on from the last commit:
    the calls before it are neither lost nor made again. Those after it are made again, from the state that was
    committed; or, with `results`, those that had ended are not, and return what they returned then.

    Args:
        path: a directory that all processes see; one journal is in it.
        objects: objects whose state is committed, by names that are the same after every restart; as in
            `Journal.register`.
        results: whether to record the results of calls, and the states of objects after them.
        repartition: called with the name of an object and the list of its states in the processes that committed,
            where these were more or fewer than now; returns the state in this process.

    Returns:
        A context manager; colocated calls made in its block are recorded, in all threads.

    Raises:
        TypeError: an argument is of a wrong type; on entering the block: an object cannot be saved.
        ValueError: `path` is empty; on entering the block: a colocated object has no state.
        JournalError: on entering the block: the path is open already, or damaged.

    Example:
        >>> import tempfile
        >>> import jax.numpy as jnp
        >>> from partjit import colocated
        >>> show = colocated.colocated_python(lambda x: print("step", int(x)), out_specs_fn=lambda x: None)
        >>> def run(path, last):
        ...     with colocated.journal(path) as journal:
        ...         step = journal.restore(0)
        ...         while step < last:
        ...             show(jnp.int32(step))
        ...             step += 1
        ...             journal.commit(step)
        >>> with tempfile.TemporaryDirectory() as path:
        ...     run(path, 2)
        ...     run(path, 3)  # as after a restart
        step 0
        step 1
        step 2

    The idea is that of write-ahead logging: Mohan et al., "ARIES", ACM TODS 17(1), 1992. docs/journal.md is the guide.
    """
    path = os.path.abspath(require_path("colocated.journal", "path", path))
    require("colocated.journal", "objects", objects, Mapping | None, "a dict of objects, by name, or None")
    results = require_flag("colocated.journal", "results", results)
    if repartition is not None:
        require_callable("colocated.journal", "repartition", repartition, "a function of a name and a list of states")
    return Journal(path, objects or {}, results, repartition)
