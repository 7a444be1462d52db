"""Messages with images: what an environment may give, what a record has of it, and what is refused."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from each_case import each_case
from PIL import Image as Pillow

import agentrl
from agentrl.env import spaces, step_results
from agentrl.env.image_parts import image_part, png, with_images, with_parts
from agentrl.errors import EnvError, UsageError
from agentrl.records import Step, Task
from agentrl.tokens import images

PIXELS = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
PART = image_part(PIXELS)
URL = PART["image_url"]["url"]


def file(kind: str, **how: Any) -> bytes:
    """An image of 31 x 17 pixels, written by Pillow."""
    out = io.BytesIO()
    Pillow.new("RGBA" if how.pop("alpha", False) else "RGB", (31, 17), (9, 8, 7)).save(out, kind, **how)
    return out.getvalue()


def test_pixels_come_back_from_a_decoder_of_others() -> None:
    decoded = Pillow.open(io.BytesIO(png(PIXELS)))
    decoded.load()
    assert (decoded.size, decoded.mode) == ((7, 5), "RGB")
    assert np.array_equal(np.asarray(decoded), PIXELS)
    with pytest.raises(UsageError, match=r"float64 \(2, 2\): give uint8 \[height, width, 3\]"):
        image_part(np.zeros((2, 2)))  # pyright: ignore[reportArgumentType]


@each_case(
    ("data", "kind"),
    [
        (file("PNG"), "image/png"),
        (file("PNG", alpha=True), "image/png"),
        (file("JPEG"), "image/jpeg"),
        (file("JPEG", progressive=True, exif=b"Exif\0\0" + bytes(40)), "image/jpeg"),
        (file("WEBP"), "image/webp"),
        (file("WEBP", lossless=True), "image/webp"),
        (file("WEBP", alpha=True, exif=b"Exif\0\0" + bytes(40)), "image/webp"),
    ],
)
def test_the_first_bytes_of_a_file_tell_its_type_and_size(data: bytes, kind: str) -> None:
    image = images.read(data)
    assert (image.media_type, image.width, image.height) == (kind, 31, 17)
    assert images.from_url(image.url) == image
    for end in range(40):  # cut off anywhere: refused, or the header is whole
        try:
            assert images.read(data[:end]).width == 31
        except ValueError as error:
            assert "are no image" in str(error)


SVG = base64.b64encode(b"<svg xmlns='http://www.w3.org/2000/svg'/>").decode()
HUGE = png(np.zeros((1, 1, 3), dtype=np.uint8)).replace(b"\0\0\0\1\0\0\0\1", b"\0\0\x20\0\0\0\x20\0", 1)


@each_case(
    ("url", "reason"),
    [
        ("https://example.org/cat.png", "give the image itself.*nothing is fetched"),
        ("file:///etc/passwd", "nothing is fetched"),
        ("/etc/passwd", "nothing is fetched"),
        (f"data:image/svg+xml;base64,{SVG}", "give one of image/png, image/jpeg, image/webp"),
        (f"data:image/png;base64,{SVG}", "are no image: give a whole PNG"),
        ("data:image/png,plain", "with ;base64"),
        ("data:image/png;base64,*", "is no base64"),
        (URL.replace("image/png", "image/jpeg"), "the data are image/png: say so"),
        (images.Image(HUGE, "image/png", 0, 0).url, "8192 x 8192 pixels: give one of at most 16777216"),
        (f"data:image/png;base64,{'A' * 12_000_000}", "about 9000000 bytes: give one of at most 8388608"),
    ],
)
def test_what_is_no_image_is_refused_with_the_reason(url: str, reason: str) -> None:
    content = [{"type": "text", "text": "See:"}, {"type": "image_url", "image_url": {"url": url}}]
    message = {"role": "user", "content": content}
    with pytest.raises(ValueError, match=r"content\[1\]: .*" + reason):
        with_images(message)
    assert (spaces.Messages(max_images=9).why_not((message,)) or "").startswith("message 0: content[1]: ")


@each_case("part", [{"type": "audio"}, {"type": "text"}, {"type": "image_url"}, "text", None])
def test_other_parts_are_refused(part: Any) -> None:
    with pytest.raises(ValueError, match=r"content\[0\] = .*: give \{'type': 'text'"):
        with_images({"role": "user", "content": [part]})


def test_a_content_of_parts_becomes_a_text_with_images_beside_it_and_comes_back() -> None:
    parts = [{"type": "text", "text": "a"}, PART, {"type": "text", "text": "bc"}, PART, PART]
    read = with_images({"role": "user", "content": parts, "name": "n"})
    shown = [{"at": at, "url": URL} for at in (1, 3, 3)]
    assert read == {"role": "user", "content": "abc", "name": "n", "images": shown}
    assert with_parts(read) == {"role": "user", "content": parts, "name": "n"}  # pyright: ignore[reportArgumentType]
    assert with_images(read) == read


def test_a_space_says_how_many_images_belong_to_it() -> None:
    two = ({"role": "user", "content": [PART, PART]},)
    assert spaces.Messages(max_images=2).contains(two)
    assert spaces.Messages(max_images=2) != spaces.Messages() and "max_images=2" in repr(spaces.Messages(max_images=2))
    reason = spaces.Messages(max_images=1).why_not(two)
    assert reason == ("2 images, at most 1 allowed: declare observation_space = Messages(max_images=2), or show fewer")
    for wrong in (3, [{"at": 0}], [{"at": "x", "url": URL}], [{"at": 0, "url": 5}]):
        assert "leave it out" in (
            spaces.Messages(max_images=9).why_not(({"role": "user", "content": "a", "images": wrong},)) or ""
        ), wrong


class Shows(agentrl.Env):
    """Shows an image at the start and after each action, and rewrites history."""

    observation_space = spaces.Messages(max_images=1)
    replayable = True

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return ({"role": "user", "content": [{"type": "text", "text": "Look. "}, PART]},), {}

    def step(self, action: str) -> Any:
        again = [{"role": "user", "content": [PART]}]
        return tuple(again), 0.0, "stop" in action, False, {"history": again, "outcome": 1.0}


async def test_the_answers_of_an_environment_have_their_images_beside_the_texts() -> None:
    env, task = agentrl.env.as_async(Shows()), Task(index=0, env="test/Shows-v0", seed=0)
    start: Step = await step_results.start(env, task, most=100_000)
    assert start.observation == ({"role": "user", "content": "Look. ", "images": [{"at": 6, "url": URL}]},)
    said: Step = await step_results.act(env, "go", task)
    assert said.observation == said.history == ({"role": "user", "content": "", "images": [{"at": 0, "url": URL}]},)
    assert images.of_steps(start.observation, [said]) == {images.from_url(URL).token: images.from_url(URL)}


class Fetches(Shows):
    def step(self, action: str) -> Any:
        part = {"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest"}}
        return ({"role": "user", "content": [part]},), 0.0, True, False, {}


async def test_an_environment_that_gives_an_address_has_failed_and_nothing_is_fetched() -> None:
    env, task = agentrl.env.as_async(Fetches()), Task(index=0, env="test/Fetches-v0", seed=0)
    await step_results.start(env, task)
    where = r"test/Fetches-v0: step of turn 3: observation: message 0: content\[0\]: url = 'http://169"
    with pytest.raises(EnvError, match=where):
        await step_results.act(env, "go", task, turn=3)


def test_check_env_takes_images_that_are_declared_and_no_others() -> None:
    agentrl.check_env(Shows, actions=("a", "stop"))

    class Undeclared(Shows):
        observation_space = spaces.Messages()

    with pytest.raises(agentrl.errors.EnvCheckFailed, match=r"declare observation_space = Messages\(max_images=1\)"):
        agentrl.check_env(Undeclared, actions=("a", "stop"))


def test_the_ids_of_images_tell_them_apart_and_where_they_lie() -> None:
    one = images.from_url(URL)
    other = images.read(png(PIXELS[::-1].copy()))
    assert one.token != other.token and min(one.token, other.token) >= images.FIRST
    assert max(one.token, other.token) < 1 << 32
    context = [5, one.token, one.token, 6, other.token, 7, one.token]
    assert list(images.runs(context)) == [(one.token, 1, 3), (other.token, 4, 5), (one.token, 6, 7)]
    assert images.placed(context, 9) == [5, 9, 9, 6, 9, 7, 9]
    known = {image.token: image for image in (one, other)}
    assert images.shown(context, known) == (one, other)
    with pytest.raises(ValueError, match="no message holds the image"):
        images.shown(context, {one.token: one})
    assert list(images.runs([1, 2, 3])) == []
