import unittest
from fractions import Fraction

from iniconf import Config, ConfigError, SyntaxFault, dumps, loads
from iniconf.writer import quote, write_value

TEXT = """
name = demo
[server]
host = localhost
port = 80
url = "http://${server.host}:${server.port}/"
copy = ${server.port}
timeout = 1m30s
[client]
servers = [${server.url}, other]
retry = 5
"""


class ConfigTest(unittest.TestCase):
    def setUp(self):
        self.config = loads(TEXT)

    def test_get(self):
        self.assertEqual(self.config.get("name"), "demo")
        self.assertEqual(self.config.get("server.port"), 80)

    def test_get_takes_the_first_that_is_there(self):
        self.assertEqual(self.config.get("client.port", "server.port", "name"), 80)

    def test_default(self):
        self.assertIsNone(self.config.get("nothing"))
        self.assertEqual(self.config.get("nothing", default=3), 3)

    def test_references_are_filled_in(self):
        self.assertEqual(self.config.get("server.url"), "http://localhost:80/")

    def test_a_lone_reference_keeps_its_type(self):
        self.assertEqual(repr(self.config.get("server.copy")), "80")

    def test_references_in_lists(self):
        self.assertEqual(self.config.get("client.servers"), ["http://localhost:80/", "other"])

    def test_references_in_a_circle(self):
        config = loads("a = ${b}\nb = x${c}\nc = ${a}")
        with self.assertRaisesRegex(ConfigError, "a -> b -> c -> a"):
            config.get("a")

    def test_a_reference_to_nothing(self):
        with self.assertRaisesRegex(ConfigError, "a refers to b, which is missing"):
            loads("a = ${b}").get("a")

    def test_require(self):
        self.assertEqual(self.config.require("server.port", int), 80)
        with self.assertRaisesRegex(ConfigError, "port is missing"):
            self.config.require("port")
        with self.assertRaisesRegex(ConfigError, "name = 'demo' is no int"):
            self.config.require("name", int)

    def test_a_truth_is_no_number(self):
        with self.assertRaises(ConfigError):
            loads("a = true").require("a", int)

    def test_seconds(self):
        self.assertEqual(self.config.seconds("server.timeout"), 90)
        self.assertEqual(self.config.seconds("client.retry"), 5)
        self.assertEqual(self.config.seconds("nothing", default="500ms"), Fraction(1, 2))
        self.assertIsNone(self.config.seconds("nothing"))
        with self.assertRaisesRegex(ConfigError, "name"):
            self.config.seconds("name")

    def test_sections(self):
        self.assertEqual(self.config.sections(), ["", "server", "client"])

    def test_section(self):
        self.assertEqual(self.config.section("client"), {"servers": ["http://localhost:80/", "other"], "retry": 5})

    def test_membership_and_names(self):
        self.assertIs("server.host" in self.config, True)
        self.assertIs("host" in self.config, False)
        self.assertEqual(self.config.names()[:2], ["name", "server.host"])

    def test_merged(self):
        merged = self.config.merged(loads("name = other\n[new]\nkey = 1"))
        self.assertEqual([merged.get("name"), merged.get("new.key"), merged.get("server.port")], ["other", 1, 80])
        self.assertEqual(self.config.get("name"), "demo")

    def test_a_key_twice(self):
        with self.assertRaisesRegex(SyntaxFault, "line 3: a.b is set twice"):
            loads("[a]\nb = 1\nb = 2")

    def test_a_bad_value_names_its_line(self):
        with self.assertRaisesRegex(SyntaxFault, "line 2: no closing quote"):
            loads("a = 1\nb = 'x")


class WriterTest(unittest.TestCase):
    def test_values(self):
        written = [write_value(value) for value in (None, True, False, 12, 1.5, "plain text", [1, "a"])]
        self.assertEqual(written, ["none", "true", "false", "12", "1.5", "plain text", "[1, a]"])

    def test_what_would_read_as_something_else_is_quoted(self):
        for text in ("1", "true", "", " a", "a # b", "a, b", "x = y", "[a]"):
            with self.subTest(text):
                self.assertEqual(write_value(text), f'"{text}"')

    def test_quote(self):
        self.assertEqual(quote('a"b\n\\'), r'"a\"b\n\\"')

    def test_only_plain_values_can_be_written(self):
        with self.assertRaisesRegex(ValueError, "dict"):
            write_value({})

    def test_dumps(self):
        text = dumps({"s.x": 1, "top": "a", "t.y": [2], "s.z": "#"})
        self.assertEqual(text, 'top = a\n\n[s]\nx = 1\nz = "#"\n\n[t]\ny = [2]\n')

    def test_nothing(self):
        self.assertEqual(dumps({}), "")

    def test_what_was_written_is_read(self):
        values = {"a": "x;y", "s.b": [True, None, "off"], "s.c": -3, "s.t.d": "line\none"}
        self.assertEqual({name: loads(dumps(values)).get(name) for name in values}, values)
        self.assertEqual(Config(values).names(), ["a", "s.b", "s.c", "s.t.d"])
