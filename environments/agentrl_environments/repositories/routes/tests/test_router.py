import unittest

from routes import MethodNotAllowed, NotFound, PatternError, Router


def answer(text):
    return lambda request: (text, request["params"])


class RouterTest(unittest.TestCase):
    def setUp(self):
        self.router = Router()
        self.router.add("/", answer("home"), name="home")
        self.router.add("/users/<id>", answer("user"), name="user")
        self.router.add("/users/new", answer("new"))
        self.router.add("/users/<int:id>", answer("number"), methods=("get", "PUT"), name="number")
        self.router.add("/users", answer("create"), methods=["post"])
        self.router.add("/<path:rest>", answer("other"))

    def test_the_pattern_that_says_most_wins(self):
        self.assertEqual(self.router.handle("GET", "/users/new"), ("new", {}))
        self.assertEqual(self.router.handle("GET", "/users/7"), ("number", {"id": 7}))
        self.assertEqual(self.router.handle("GET", "/users/ann"), ("user", {"id": "ann"}))
        self.assertEqual(self.router.handle("GET", "/some/where"), ("other", {"rest": "some/where"}))

    def test_of_equal_patterns_the_first_wins(self):
        self.router.add("/users/<other>", answer("late"))
        self.assertEqual(self.router.handle("GET", "/users/x"), ("user", {"id": "x"}))

    def test_methods(self):
        self.assertEqual(self.router.handle("put", "/users/7"), ("number", {"id": 7}))
        self.assertEqual(self.router.handle("POST", "/users"), ("create", {}))

    def test_methods_that_are_not_allowed(self):
        with self.assertRaisesRegex(MethodNotAllowed, "allowed: GET, PUT") as caught:
            self.router.handle("DELETE", "/users/7")
        self.assertEqual(caught.exception.allowed, ["GET", "PUT"])

    def test_head_is_served_by_get(self):
        self.assertEqual(self.router.handle("HEAD", "/users/new"), ("new", {}))

    def test_nothing_there(self):
        router = Router()
        router.add("/a", answer("a"))
        with self.assertRaises(NotFound):
            router.handle("GET", "/b")

    def test_a_slash_at_the_end(self):
        self.assertEqual(self.router.handle("GET", "/users/new/"), ("new", {}))
        self.assertEqual(self.router.handle("GET", "/"), ("home", {}))

    def test_the_request(self):
        router = Router()
        router.add("/q/<x>", lambda request: request)
        request = {"method": "GET", "path": "/q/1", "query": {"a": ["1", "2"]}, "params": {"x": "1"}}
        self.assertEqual(router.handle("get", "/q/1?a=1&a=2#top"), request)

    def test_names_are_unique(self):
        with self.assertRaisesRegex(ValueError, "home"):
            self.router.add("/again", answer("x"), name="home")
        self.router.add("/again", answer("x"))
        self.router.add("/more", answer("x"))

    def test_url(self):
        self.assertEqual(self.router.url("home"), "/")
        self.assertEqual(self.router.url("user", id="a b"), "/users/a%20b")
        self.assertEqual(self.router.url("user", query={"page": 2}, id="x"), "/users/x?page=2")

    def test_url_of_what_is_not_there(self):
        with self.assertRaises(NotFound):
            self.router.url("nobody")
        with self.assertRaises(PatternError):
            self.router.url("number", id="x")

    def test_before(self):
        seen = []
        self.router.before(lambda request: seen.append(request["path"]))
        self.router.before(lambda request: "stop" if "stop" in request["query"] else None)
        self.assertEqual(self.router.handle("GET", "/users/new"), ("new", {}))
        self.assertEqual(self.router.handle("GET", "/users/new?stop"), "stop")
        self.assertEqual(seen, ["/users/new", "/users/new"])

    def test_include(self):
        api = Router()
        api.add("/items/<int:id>", answer("item"), name="item", methods=("DELETE",))
        api.add("/plain", answer("plain"))
        self.router.include("/api/v1/", api)
        self.assertEqual(self.router.handle("DELETE", "/api/v1/items/3"), ("item", {"id": 3}))
        self.assertEqual(self.router.handle("GET", "/api/v1/plain"), ("plain", {}))
        self.assertEqual(self.router.url("api.v1.item", id=3), "/api/v1/items/3")

    def test_listing(self):
        router = Router()
        router.add("/<x>", answer("x"))
        router.add("/a", answer("a"), methods=("GET", "post"), name="a")
        self.assertEqual(router.listing(), ["GET,POST /a a", "GET /<x> -"])
