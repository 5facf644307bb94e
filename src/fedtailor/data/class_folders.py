"""Folders of pictures by class, or by client and class, as the rows of a table."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ..errors import InputError, brief, listed
from .images import PICTURES

_ALLOWED = "allowed: FOLDER/CLASS/picture.png, or FOLDER/CLIENT/CLASS/picture.png"


def picture_table(folder: Path, name: str) -> Any:
    """Read a folder of pictures as a ``datasets.Dataset`` with the columns of `picture_rows`, and
    the pictures themselves, which stay in their files, as ``image``."""
    from datasets import Dataset, Image

    rows = picture_rows(folder, name)
    columns = {column: [row[column] for row in rows] for column in rows[0]}
    columns["image"] = [f"{folder.absolute()}/{file}" for file in columns["file"]]
    try:
        return Dataset.from_dict(columns).cast_column("image", Image())
    except UnicodeEncodeError as error:
        raise InputError(f"{name}: a file's name is not UTF-8: {error.object!a}") from None


def picture_rows(folder: Path, name: str) -> list[dict[str, str]]:
    """A row for each picture in a folder: its class as ``label``, the ``client`` if folders of
    classes lie in folders of clients, and its place in the folder as ``file``.

    Hidden files, and those that are no pictures, don't count. Raises InputError where pictures lie
    elsewhere than in folders of classes, or such a folder has none."""
    places = _places(folder)
    full = {place: files for place, files in places.items() if files}
    if not full:
        kinds = ", ".join(PICTURES)
        raise InputError(
            f"{name!r} is a folder without JSON files or pictures ({kinds}); {_ALLOWED}"
        )
    first, depth = next((place, len(place)) for place in full)
    for place, files in full.items():
        at = brief("/".join((*place, files[0])))
        if not 1 <= len(place) <= 2:
            raise InputError(f"{name}: {at} lies in no folder of a class; {_ALLOWED}")
        if len(place) != depth:
            other = brief("/".join((*first, full[first][0])))
            raise InputError(f"{name}: {at} and {other} are not equally deep; {_ALLOWED}")
    if depth == 2:
        check_splits(folder, name)
    with_pictures = {place[:n] for place in full for n in range(depth + 1)}
    classes = {place[-1] for place in full}
    for place in places:
        if place not in with_pictures and place[-1] not in classes:
            at = brief("/".join(place))
            raise InputError(f"{name}: the folder {at} has no pictures; remove or fill it")
    return [
        {"label": place[-1]}
        | ({"client": place[0]} if depth == 2 else {})
        | {"file": "/".join((*place, file))}
        for place, files in full.items()
        for file in files
    ]


def check_splits(folder: Path, name: str) -> None:
    """Raise InputError where a folder has a folder ``train``, and others than that and ``test``."""
    names = [path.name for path in sorted(folder.iterdir()) if path.is_dir() and _counts(path.name)]
    if "train" in names and names != ["test", "train"]:
        raise InputError(
            f"{name} has the folders {listed(names)}; only train and test are read together; name "
            "two others with data.path and data.test_path"
        )


def _places(folder: Path) -> dict[tuple[str, ...], list[str]]:
    """The pictures in each folder, by the folder's place in ``folder``; sorted."""
    places = {}
    for at, folders, files in os.walk(folder, onerror=_raise, followlinks=True):
        place = Path(at).relative_to(folder).parts
        # what is deeper is no folder of a class; links may lead back
        folders[:] = sorted(filter(_counts, folders)) if len(place) < 3 else []
        pictures = [file for file in files if Path(file).suffix.lower() in PICTURES]
        places[place] = sorted(filter(_counts, pictures))
    return places


def _counts(name: str) -> bool:
    return not name.startswith(".") and name != "__MACOSX"


def _raise(error: OSError) -> None:
    raise error
