"""What all saved records share: frozen, validated once at the edge, JSON on disk."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from dapple.errors import FileError
from dapple.files import cannot_write, describe_validation, read_text

R = TypeVar("R", bound="Record")


class Record(BaseModel):
    """Base of the saved records: immutable, unknown fields refused, numbers finite."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=()
    )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the record as JSON; a reader never sees half a file."""
        target = Path(path)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
            partial.write_text(self.to_json() + "\n", encoding="utf-8")
            partial.replace(target)
        except OSError as error:
            raise cannot_write(target, error) from error

    def to_json(self) -> str:
        """The record as indented JSON; fields that are not set are left out."""
        return json.dumps(self.model_dump(mode="json", exclude_none=True), indent=1)

    def fingerprint(self) -> str:
        """Sixteen hex digits that change whenever the content does."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]


def load_record(kind: type[R], path: str | os.PathLike[str]) -> R:
    """Read a saved record.

    Raises:
        FileError: the file is missing, is not JSON, or breaks the format; names file and field.
    """
    text = read_text(path)
    try:
        data = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise FileError(f"{path} is not JSON: {error}; expected a {kind.__name__} file") from error
    return validate_record(kind, data, str(path))


def validate_record(kind: type[R], data: Any, where: str) -> R:
    """Validate parsed data into a record, with the first faults named by field.

    Raises:
        FileError: names `where`, the field, the value and what was expected.
    """
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise FileError(f"{where}: {describe_validation(error)}") from error
