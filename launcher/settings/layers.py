"""A job is said in layers: a job file, `--set`, and the command line, each of which wins over those before."""

from __future__ import annotations

from typing import Any, NamedTuple

from launcher.job import Job, UsageError
from launcher.settings.values import GPU

# To say one of these is to take back what an earlier layer says of the other.
_RIVALS = (("script", "module"), ("hosts", "hostfile"))


class Layer(NamedTuple):
    """What one place says of a job.

    launch: keys of [launch] and their values, as the fields of a `Job` have them; no `args`
    args: [args], as TOML has it
    words: what else the script is to find in `sys.argv`, after [args]
    """

    launch: dict[str, Any]
    args: dict[str, Any]
    words: tuple[str, ...] = ()

    def over(self, lower: Layer) -> Layer:
        """This one, with what `lower` says of things of which it says nothing; words add up."""
        hidden = {name for pair in _RIVALS for name in pair if any(one in self.launch for one in pair)}
        left = {key: value for key, value in lower.launch.items() if key not in hidden}
        return Layer(left | self.launch, lower.args | self.args, lower.words + self.words)

    def job(self) -> Job:
        """The job that is said. Raises: UsageError if there can be no such job: no such script, no GPU to count, ..."""
        fields = dict(self.launch)
        if path := fields.pop("hostfile", None):
            if "hosts" in fields:
                raise UsageError(f"give hosts or a hostfile, not both: {path}")
            from launcher.hosts import read_hostfile

            fields["hosts"] = read_hostfile(path)
        if fields.get("n") == GPU:
            if fields.get("hosts"):
                text = "give every host its number of ranks, as in --hosts a:8,b:8"
                raise UsageError(f"-n gpu counts the GPUs of this machine, not those of hosts: {text}")
            from launcher.devices import count

            fields["n"] = count()
        return Job(**fields, args=(*words(self.args), *self.words))


def words(args: dict[str, Any]) -> tuple[str, ...]:
    """The command-line arguments that an [args] table stands for.

    >>> words({"lr": 0.1, "layers": [64, 10], "fast": True, "slow": False})
    ('--lr', '0.1', '--layers', '64', '10', '--fast')
    Raises: UsageError for a value that is no string, number, boolean or list of these.
    """
    found: list[str] = []
    for key, value in args.items():
        values = value if isinstance(value, list) else [value]
        if any(isinstance(one, dict | list) for one in values):
            raise UsageError(f"{key} in [args] should be a string, a number, a boolean or a list of these")
        if value is not False:
            found += [f"--{key}", *(word(one) for one in values if value is not True)]
        if any("\0" in word for word in found):
            raise UsageError(f"{key!r} in [args] has a zero byte, which no argument of a program can have")
    return tuple(found)


def word(value: object) -> str:
    """A string, number or boolean as it is written on a command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)
