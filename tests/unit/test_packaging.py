"""Tests what setup.py says of the package to a registry, and what it leaves to the repository."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REPOSITORY = "https://git.example/tf_ooo"
README = """# Name

Read [the start](docs/index.md#one) or [elsewhere](https://else.example/a.md), see [below](#below).

![Two steps](docs/images/steps.png)

Above, one; below, two. [Words](docs/words.md).

## Below
Text.
"""


@pytest.fixture
def of_setup(monkeypatch):
    """Runs setup.py without building anything: what it tells setuptools, and its functions."""

    def run(repository):
        said = {}
        monkeypatch.setenv("TF_OOO_REPOSITORY_URL", repository)
        monkeypatch.setattr("setuptools.setup", said.update)
        functions = runpy.run_path(str(ROOT / "setup.py"))
        return said, functions["for_registry"]

    return run


def test_links_lead_to_the_repository(of_setup):
    _, for_registry = of_setup("")
    text = for_registry(README, REPOSITORY)
    assert f"[the start]({REPOSITORY}/blob/main/docs/index.md#one)" in text
    assert f"![Two steps]({REPOSITORY}/raw/main/docs/images/steps.png)" in text
    assert "[elsewhere](https://else.example/a.md), see [below](#below)" in text
    assert len(text.splitlines()) == len(README.splitlines())


def test_without_a_repository_links_are_texts_and_pictures_go(of_setup):
    _, for_registry = of_setup("")
    text = for_registry(README, "")
    first = "Read the start or [elsewhere](https://else.example/a.md), see [below](#below)."
    assert text == f"# Name\n\n{first}\n\n## Below\nText.\n"


def test_a_heading_below_a_picture_stays(of_setup):
    _, for_registry = of_setup("")
    assert for_registry("![a](b.png)\n\n# Title\n\nText\n", "") == "# Title\n\nText\n"


@pytest.mark.parametrize("repository", ["", f"{REPOSITORY}/"])
def test_the_readme_has_no_link_that_a_registry_cannot_follow(of_setup, repository):
    said, _ = of_setup(repository)
    targets = re.findall(r"\]\(([^)]+)\)", said["long_description"])
    assert [target for target in targets if not target.startswith((f"{REPOSITORY}/", "#", "https:"))] == []
    assert targets or not repository
    assert "## Try it" in said["long_description"]


def test_addresses_are_named_only_where_there_is_a_repository(of_setup):
    assert of_setup("")[0]["project_urls"] == {}
    urls = of_setup(f"{REPOSITORY}/")[0]["project_urls"]
    assert urls.keys() == {"Source", "Documentation", "Issues", "Changelog"}
    for name in ("Documentation", "Changelog"):
        assert (ROOT / urls[name].removeprefix(f"{REPOSITORY}/blob/main/")).is_file()
