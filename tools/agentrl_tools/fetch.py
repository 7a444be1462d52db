"""Fetch a page over HTTP, from hosts on a list and from no other, redirects included. Runs outside of any box.

A page is unpacked here and not by httpx, which unpacks a whole chunk at once: 131 kB may hold gigabytes."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from urllib.parse import urljoin, urlsplit

import httpx
import trio

from agentrl.env.limits import positive_seconds
from agentrl.env.tools.tool_results import readable
from agentrl.errors import ConfigError, ToolError, ToolTimeout, UsageError
from agentrl.protocols import ToolResult
from agentrl.records import Json
from agentrl_tools.base import OUTPUT_BYTES, SchemaChecked, text_result

_PORTS = {"http": 80, "https": 443}
_REDIRECTS = 5
_HEADERS = {"User-Agent": "agentrl", "Accept-Encoding": "gzip, deflate"}


class HttpFetch(SchemaChecked):
    """`fetch(url)`: GET, no cookies, no credentials.

    `allow` names hosts (`docs.python.org`, `*.example.org`, `localhost:8080`); without a port only the scheme's own is
    allowed. A host on the list is trusted with its name service too."""

    parallel = True

    def __init__(
        self,
        allow: Sequence[str],
        *,
        timeout_s: float = 15.0,
        fetch_bytes: int = 1 << 20,
        output_bytes: int = OUTPUT_BYTES,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """At most `fetch_bytes` of a body are read, at most `output_bytes` shown. Raises UsageError."""
        if isinstance(allow, str):
            raise UsageError(f"allow = {allow!r}: give a list of hosts")
        for entry_index, allowed_host in enumerate(allow):
            if not isinstance(allowed_host, str) or re.fullmatch(r"[^\s/@]+", allowed_host) is None:
                raise ConfigError(
                    f"allow[{entry_index}]",
                    allowed_host,
                    "give a host alone, such as 'docs.python.org' or 'localhost:80'",
                )
        url_schema: Json = {"type": "string", "description": "http or https address", "maxLength": 2000}
        super().__init__(
            "fetch", f"Fetch a page. Allowed hosts: {', '.join(allow) or 'none'}.", {"url": url_schema}, "url"
        )
        self._allow = [allowed_host.lower() for allowed_host in allow]
        self._limit_s = positive_seconds("timeout_s", timeout_s)
        self._fetch_bytes, self._output_bytes = fetch_bytes, output_bytes
        self.timeout_s = timeout_s + 5.0
        self._transport = transport

    async def call(self, arguments: Mapping[str, Json]) -> ToolResult:
        """Raises ToolArgumentError, ToolError, ToolTimeout."""
        page_url = self.checked(arguments)["url"]
        with trio.move_on_after(self._limit_s):
            return await self._fetch(page_url)
        raise ToolTimeout(f"{page_url} did not answer within {self._limit_s:g} s")

    async def _fetch(self, url: str) -> ToolResult:
        client_options = {"follow_redirects": False, "trust_env": False, "timeout": self._limit_s}
        async with httpx.AsyncClient(transport=self._transport, **client_options) as http_client:
            for _ in range(_REDIRECTS + 1):
                self._must_be_allowed(url)
                try:
                    async with http_client.stream("GET", url, headers=_HEADERS) as page_response:
                        if page_response.has_redirect_location:
                            url = urljoin(url, page_response.headers["location"])
                            continue
                        return await self._shown(url, page_response)
                except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:  # the last of urljoin, and of IDNA
                    raise ToolError(f"cannot fetch {url}: {error or type(error).__name__}") from error
        raise ToolError(f"more than {_REDIRECTS} redirects")

    async def _shown(self, url: str, response: httpx.Response) -> ToolResult:
        page_bytes = await self._body(url, response)
        was_cut = len(page_bytes) > self._fetch_bytes
        page_text = readable(page_bytes[: self._fetch_bytes]) or "[empty]"
        page_result = text_result(page_text, self._output_bytes, is_error=response.is_error, truncated=was_cut)
        if not response.is_error:
            return page_result
        error_text = f"HTTP {response.status_code} from {url}\n{page_result.content}"
        return ToolResult(content=error_text, is_error=True, truncated=page_result.truncated)

    async def _body(self, url: str, response: httpx.Response) -> bytes:
        """The bytes of a page, unpacked, up to one past the bound. Raises ToolError for another packing."""
        packing = response.headers.get("content-encoding", "identity").strip().lower()
        if packing not in ("", "identity", "gzip", "x-gzip", "deflate"):
            raise ToolError(f"cannot fetch {url}: it is packed as {packing[:40]!r}, which was not asked for")
        decompressor = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32) if packing not in ("", "identity") else None
        page_bytes = bytearray()
        async for raw_chunk in response.aiter_raw(1 << 14):
            bytes_left = self._fetch_bytes + 1 - len(page_bytes)
            try:
                page_bytes += decompressor.decompress(raw_chunk, bytes_left) if decompressor else raw_chunk[:bytes_left]
            except zlib.error as error:
                raise ToolError(f"cannot unpack {url}: {error}") from error
            if len(page_bytes) > self._fetch_bytes:
                return bytes(page_bytes)
        if decompressor and not decompressor.eof:
            raise ToolError(f"cannot unpack {url}: it ends too early")
        return bytes(page_bytes)

    def _must_be_allowed(self, url: str) -> None:
        try:
            url_parts = urlsplit(url)
            host_name, port_number = (url_parts.hostname or "").lower().rstrip("."), url_parts.port
        except ValueError as error:
            raise ToolError(f"not an address: {error}") from error
        if url_parts.scheme not in _PORTS or not host_name:
            raise ToolError(f"not an http address: {url[:200]!r}")
        if url_parts.username is not None or url_parts.password is not None:
            raise ToolError("an address with a user name is not allowed")
        is_default_port = port_number is None or port_number == _PORTS[url_parts.scheme]
        host_names = {f"{host_name}:{port_number}"} | ({host_name} if is_default_port else set())
        if not any(fnmatchcase(host_text, allowed_host) for allowed_host in self._allow for host_text in host_names):
            raise ToolError(f"{host_name} is not on the list of allowed hosts: {', '.join(self._allow) or 'none'}")
