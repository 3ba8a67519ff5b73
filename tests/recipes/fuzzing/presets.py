"""YAML as people write it, and as they should not."""

import json
import re
from dataclasses import dataclass, field

PLAIN = re.compile(r"[\w.][\w./=,-]*(:[\w.]+)?")


def as_yaml(flag: str, value: str, *, is_quoted: bool) -> bytes:
    """A line of a preset; without quotes where these can be left out."""
    text = value if PLAIN.fullmatch(value) and not is_quoted else json.dumps(value, ensure_ascii=False)
    return f"{flag}: {text}\n".encode()


@dataclass(frozen=True)
class Chaos:
    """A line or more of a preset, and what it asks for unless it is ``refused``."""

    text: bytes
    refused: bool = True
    asked: dict[str, str] = field(default_factory=dict)


REFUSED_LINES = r"""
seed: [1, 2]
seed: {a: 1}
seed:
seed: ~
seed: null
seed: []
seed: .nan
seed: 0x10
seed: yes
seed: 2020-01-01
seed: |
seed: '1
seed: *x
seed: !x 1
seed: !!python/object/apply:os.getpid []
seed:1
--seed: 3
Seed: 1
- seed
prompt:
data_dir: null
train_file: ~
overwrite: []
overwrite: {}
overwrite: [
overwrite: 2
overwrite: --resume
verify: --overwrite
report_to: []
report_to: [~]
report_to: [[none]]
report_to: [none, --overwrite]
report_to: {none: 1}
output_dir: "a\0b"
output_dir: !!binary aGVsbG8=
max_steps: 1:30
max_steps: 1.0
learning_rate: .inf
learning_rate: 1e309
config: preset.yaml
help: true
a: &a [*a]
<<: {seed: 1}
1: 2
null: 3
true: yes
é: 1
"""
REFUSED_BYTES = (
    *(b"\tseed: 1\n", b"seed: 1\nseed: 2\n", b"seed: 1\nse-ed: 2\n", b"? [a]\n: b\n", b"a: &a 1\nb: &b [*a, *a]\n"),
    *(b"\xff\xfe\xff\n", b"\x00\n", b"%YAML 9.9\n---\nseed: 1\n", b"seed: 1\n---\nseed: 2\n", b"[" * 5000),
    b"seed: " + b"9" * 5000 + b"\n",
)
CHAOS = (
    *(Chaos(f"{line}\n".encode()) for line in REFUSED_LINES.strip().splitlines()),
    *map(Chaos, REFUSED_BYTES),
    Chaos(b"# a comment\n", refused=False),
    Chaos(b"{}\n", refused=False),
    Chaos(b"seed: &a 3\nmax_grad_norm: *a\n", refused=False, asked={"seed": "3", "max_grad_norm": "3"}),
    Chaos(b"seed: 012\n", refused=False, asked={"seed": "12"}),
    Chaos(b"seed: 1_1\n", refused=False, asked={"seed": "11"}),
    Chaos(b"seed: !!int '4'\n", refused=False, asked={"seed": "4"}),
    Chaos(b"learning_rate: 1e-2\n", refused=False, asked={"learning_rate": "0.01"}),
    Chaos(b"report_to: [none]\n", refused=False, asked={"report_to": "none"}),
    Chaos(b"overwrite: Yes\n", refused=False, asked={"overwrite": "true"}),
    Chaos(b"output_dir: 2020-01-01\n", refused=False, asked={"output_dir": "2020-01-01"}),
    Chaos(b"output_dir: 1:30\n", refused=False, asked={"output_dir": "1:30"}),
    Chaos(b"output_dir: no\n", refused=False, asked={"output_dir": "no"}),
    Chaos(b"output_dir: >\n  two\n  words\n", refused=False),
)
