"""Routes with methods, names and groups."""

from routes.pattern import Pattern
from routes.query import parse_query, split_url, write_query


class NotFound(LookupError):
    """No route has this path."""


class MethodNotAllowed(LookupError):
    """The path has routes, but not for this method; `allowed` are those that it has."""

    def __init__(self, allowed):
        super().__init__("allowed: " + ", ".join(allowed))
        self.allowed = allowed


class Route:
    """What is done for paths of a pattern and some methods."""

    def __init__(self, pattern, handler, methods, name):
        self.pattern = pattern
        self.handler = handler
        self.methods = methods
        self.name = name


class Router:
    """Routes; of several that fit, the one that says most about its paths wins, then the one added first."""

    def __init__(self):
        self._routes = []
        self._before = []

    def add(self, pattern, handler, methods=("GET",), name=None):
        """Add a route. Raises ValueError if the name is taken."""
        if name is not None and any(route.name == name for route in self._routes):
            raise ValueError(f"a route named {name} is there")
        methods = tuple(method.upper() for method in methods)
        self._routes.append(Route(Pattern(pattern), handler, methods, name))

    def before(self, function):
        """Have `function(request)` called before the handler; if it returns something, that is the answer."""
        self._before.append(function)

    def include(self, prefix, other):
        """Add all routes of another router below a prefix; names get the prefix's parts in front, joined by points."""
        dotted = ".".join(part for part in prefix.split("/") if part)
        for route in other._routes:
            name = None if route.name is None else f"{dotted}.{route.name}"
            self.add(prefix.rstrip("/") + route.pattern.text, route.handler, route.methods, name)

    def find(self, method, path):
        """The route and what its pattern captured. A slash at the end does not matter; GET routes serve HEAD too.
        Raises NotFound, MethodNotAllowed."""
        if len(path) > 1 and path.endswith("/"):
            path = path[:-1]
        method = method.upper()
        allowed = set()
        best = None
        for route in self._routes:
            captured = route.pattern.match(path)
            if captured is None:
                continue
            allowed.update(route.methods)
            serves = method in route.methods or (method == "HEAD" and "GET" in route.methods)
            if serves and (best is None or route.pattern.weight() > best[0].pattern.weight()):
                best = (route, captured)
        if best is not None:
            return best
        if allowed:
            raise MethodNotAllowed(sorted(allowed))
        raise NotFound(path)

    def handle(self, method, url):
        """What the handler of a URL returns. It is called with a request, a dict with `method`, `path`, `query` (values
        in lists) and `params` (what was captured)."""
        path, query, _ = split_url(url)
        route, captured = self.find(method, path)
        request = {"method": method.upper(), "path": path, "query": parse_query(query), "params": captured}
        for function in self._before:
            answer = function(request)
            if answer is not None:
                return answer
        return route.handler(request)

    def url(self, name, query=None, **values):
        """The URL of a named route. Raises NotFound for an unknown name, PatternError for values that do not fit."""
        for route in self._routes:
            if route.name == name:
                path = route.pattern.build(values)
                return f"{path}?{write_query(query)}" if query else path
        raise NotFound(name)

    def listing(self):
        """Lines `METHODS pattern name`, the pattern that says most first."""
        routes = sorted(self._routes, key=lambda route: route.pattern.weight(), reverse=True)
        return [" ".join([",".join(route.methods), route.pattern.text, route.name or "-"]) for route in routes]
