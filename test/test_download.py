"""Downloads over a real local server: what is asked for, what is kept, what is refused."""

import time
from functools import partial

import pytest
from http_server import serve

from vslam_features.artifacts import download as module
from vslam_features.artifacts.download import download
from vslam_features.errors import CacheError, FetchError

CONTENT = bytes(range(256)) * 400  # 102400 bytes
OTHER = CONTENT[::-1]
SIZE = len(CONTENT)
DATE = "Wed, 01 Jan 2025 00:00:00 GMT"


@pytest.fixture
def part(tmp_path):
    return tmp_path / "weights" / ".file.part"


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def steps():
    return []


@pytest.fixture
def fetch(part, steps):
    return partial(download, part=part, size=SIZE, progress=lambda *at: steps.append(at), pause_s=0.0)


def test_a_whole_file_and_its_progress(fetch, part, steps):
    with serve(CONTENT) as site:
        fetch(site.url)
    assert part.read_bytes() == CONTENT
    assert site.asked == [(None, None, 200)]
    assert steps[0] == (0, SIZE) and steps[-1] == (SIZE, SIZE)
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)


def test_a_cut_download_asks_for_the_rest_only(fetch, part):
    with serve(CONTENT, cuts=[30000, 20000]) as site:
        fetch(site.url)
    assert part.read_bytes() == CONTENT
    assert site.asked == [(None, None, 200), ("bytes=30000-", '"1"', 206), ("bytes=50000-", '"1"', 206)]


def test_a_later_run_continues(fetch, part):
    with serve(CONTENT, cuts=[10000, 10000, 10000]) as site:
        with pytest.raises(FetchError, match="broke after 30000 of 102400 bytes, 3 times; the next fetch continues"):
            fetch(site.url)
        assert part.read_bytes() == CONTENT[:30000]
        fetch(site.url)
    assert part.read_bytes() == CONTENT
    assert site.asked[3:] == [("bytes=30000-", '"1"', 206)]


def test_what_is_whole_is_not_asked_for_again(fetch, part):
    with serve(CONTENT) as site:
        fetch(site.url)
        fetch(site.url)
    assert len(site.asked) == 1 and part.read_bytes() == CONTENT


def test_a_file_that_changed_meanwhile_starts_again(fetch, part):
    with serve(OTHER, cuts=[30000], replacements=[None, CONTENT]) as site:
        fetch(site.url)
    assert part.read_bytes() == CONTENT
    assert site.asked == [(None, None, 200), ("bytes=30000-", '"1"', 200)]


def test_another_url_does_not_continue_what_the_first_began(fetch, part):
    with serve(OTHER, cuts=[30000] * 3) as first, pytest.raises(FetchError):
        fetch(first.url)
    with serve(CONTENT) as second:
        fetch(second.url)
    assert part.read_bytes() == CONTENT and second.asked == [(None, None, 200)]


@pytest.mark.parametrize(
    "how, second",
    [
        ({"etag": 'W/"1"', "last_modified": DATE}, ("bytes=9000-", DATE, 206)),
        ({"etag": 'W/"1"'}, (None, None, 200)),
        ({"etag": ""}, (None, None, 200)),
        ({"ranges": False}, ("bytes=9000-", '"1"', 200)),
    ],
    ids=["by date", "weak tag", "no tag", "no ranges"],
)
def test_without_a_strong_tag_or_ranges(fetch, part, how, second):
    with serve(CONTENT, cuts=[9000], **how) as site:
        fetch(site.url)
    assert part.read_bytes() == CONTENT
    assert site.asked[1] == second


def test_notes_that_are_damaged_start_again(fetch, part):
    with serve(CONTENT, cuts=[9000] * 3) as site:
        with pytest.raises(FetchError):
            fetch(site.url)
        part.with_name(part.name + ".json").write_text('{"url": 3')
        fetch(site.url)
    assert part.read_bytes() == CONTENT and site.asked[3] == (None, None, 200)


def test_a_part_that_is_longer_than_the_file_starts_again(fetch, part):
    with serve(CONTENT, cuts=[9000] * 3) as site:
        with pytest.raises(FetchError):
            fetch(site.url)
        part.write_bytes(b"x" * (SIZE + 1))
        fetch(site.url)
    assert part.read_bytes() == CONTENT


def test_a_missing_file_is_not_tried_again(fetch, part):
    with serve(CONTENT, statuses=[404]) as site, pytest.raises(FetchError, match="^HTTP 404 Not Found$"):
        fetch(site.url)
    assert len(site.asked) == 1 and not part.exists()


def test_a_server_in_trouble_is_tried_again(fetch, part):
    with serve(CONTENT, statuses=[503, 429]) as site:
        fetch(site.url)
    assert part.read_bytes() == CONTENT and [a[2] for a in site.asked] == [503, 429, 200]
    part.unlink()
    with serve(CONTENT, statuses=[500] * 9) as site, pytest.raises(FetchError, match="HTTP 500 .*, 3 times"):
        fetch(site.url)
    assert len(site.asked) == 3


@pytest.mark.parametrize("length", [True, False])
def test_a_web_page_in_the_place_of_the_file_is_named(fetch, part, length):
    page = b"<!DOCTYPE html><html><title>Sign in</title>" + b" " * 500
    with serve(page, length=length) as site:
        with pytest.raises(FetchError, match="has 543 bytes, expected 102400; it is a web page .*titled 'Sign in'"):
            fetch(site.url)
    assert len(site.asked) == 1 and not list(part.parent.iterdir())


@pytest.mark.parametrize("length", [True, False])
def test_a_longer_file_is_refused(fetch, part, length):
    with serve(CONTENT + b"x", length=length) as site, pytest.raises(FetchError, match="102401 bytes|more than the"):
        fetch(site.url)
    assert not list(part.parent.iterdir())


def test_redirects_are_followed_and_stay_on_the_web(fetch, part, tmp_path):
    with serve(CONTENT, cuts=[5000]) as site:
        fetch(site.url.replace("/file", "/moved"))
        assert part.read_bytes() == CONTENT and site.asked[1] == ("bytes=5000-", '"1"', 206)
        part.unlink()
        secret = tmp_path / "secret"
        secret.write_bytes(CONTENT)
        for target in (secret.as_uri(), "ftp://127.0.0.1/file"):
            site.redirect = target
            with pytest.raises(FetchError):
                fetch(site.url.replace("/file", "/moved"))
            assert not part.exists()


def test_a_silent_server_is_given_up(fetch, part):
    with serve(CONTENT, chunk_s=3.0, cuts=[2000] * 3) as site:
        begin = time.monotonic()
        with pytest.raises(FetchError, match="timed out.*3 times"):
            fetch(site.url, timeout_s=0.2)
        assert time.monotonic() - begin < 2.5


def test_nobody_listens(fetch):
    with serve(CONTENT) as site:
        pass
    with pytest.raises(FetchError, match="no connection .*refused.*3 times"):
        fetch(site.url)


def test_an_unknown_host_is_not_tried_again(fetch, monkeypatch):
    monkeypatch.setattr(module, "ATTEMPTS", 100)
    with pytest.raises(FetchError, match="host is not known here"):
        fetch("http://nowhere.invalid/file")


def test_a_full_disk_is_no_fault_of_the_server(fetch, part):
    part.parent.mkdir()
    part.symlink_to("/dev/full")
    with serve(CONTENT) as site, pytest.raises(CacheError, match="No space left.*make room"):
        fetch(site.url)
    assert len(site.asked) == 1
