"""Random JSON schemas of the kind that the JSON Schema test suite has, every one satisfiable.

Answers to them are short: texts, lists and numbers are bounded, objects are closed or small.
"""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]

NAMES = ("name", "age", "tags", "id", "x", "is_ok", "größe", "first name", 'quo"te', "a/b", "Δ")
WORDS = ("red", "green", "blue", "x", "", "naïve", 'say "hi"', "back\\slash", "tab\there", "日本")
PATTERNS = ("^[a-z]{2,8}$", "^[A-Z][a-z]+-[0-9]{2,4}$", "^(foo|bar)*baz$", "[0-9]{3}", r"^\d+\.\d$")
FORMATS = ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid")


# Of these every answer comes to an end, however it is chosen.
ENDING_PATTERNS = ("^[a-z]{2,8}$", "^[A-Z][a-z]{1,9}-[0-9]{2,4}$", "^(foo|bar){0,3}baz$")
ENDING_FORMATS = ("date", "ipv4", "uuid")


def random_schema(seed: int, *, ending: bool = False) -> Schema:
    """A schema by its number; the same one each time.

    Args:
        ending: no answer to it is long: without numbers of any number of digits, and the like.
    """
    return _Generator(random.Random(seed), ending).root()


class _Generator:
    def __init__(self, rng: random.Random, ending: bool) -> None:
        self.rng = rng
        self.ending = ending
        self.definitions: dict[str, Schema] = {}

    def root(self) -> Schema:
        for name in ("leaf", "pair")[: self.rng.randrange(3)]:
            self.definitions[name] = self.scalar() if name == "leaf" else self.object(1)
        tree = self.rng.random() < 0.15 and not self.ending
        schema = self.object(3) if self.rng.random() < 0.7 else self.any(3)
        if tree:
            self.definitions["tree"] = {
                "type": "object",
                "properties": {
                    "value": self.scalar(),
                    "children": {
                        "type": "array",
                        "maxItems": 2,
                        "items": {"$ref": "#/$defs/tree"},
                    },
                },
                "required": ["value"],
                "additionalProperties": False,
            }
            schema = {"$ref": "#/$defs/tree"}
        return {**schema, "$defs": self.definitions} if self.definitions else schema

    def any(self, depth: int) -> Schema:
        kinds = [self.scalar, self.scalar, self.literal, self.reference]
        if depth:
            kinds += [
                lambda: self.object(depth - 1),
                lambda: self.array(depth - 1),
                lambda: self.tuple(depth - 1),
                lambda: self.union(depth - 1),
                lambda: self.all_of(),
            ]
        return self.rng.choice(kinds)()

    def scalar(self) -> Schema:
        return self.rng.choice([self.string, self.integer, self.number, self.boolean, self.null])()

    def boolean(self) -> Schema:
        return {"type": "boolean"}

    def null(self) -> Schema:
        return {"type": "null"}

    def string(self) -> Schema:
        kind = self.rng.randrange(4)
        if kind == 0:
            patterns = ENDING_PATTERNS if self.ending else PATTERNS
            return {"type": "string", "pattern": self.rng.choice(patterns)}
        if kind == 1:
            formats = ENDING_FORMATS if self.ending else FORMATS
            return {"type": "string", "format": self.rng.choice(formats)}
        least = self.rng.randrange(4)
        return {"type": "string", "minLength": least, "maxLength": least + self.rng.randrange(12)}

    def integer(self) -> Schema:
        least = self.rng.randint(-1000, 1000)
        schema: Schema = {"type": "integer"}
        if self.ending or self.rng.random() < 0.8:
            schema[self.rng.choice(["minimum", "exclusiveMinimum"])] = least
            schema[self.rng.choice(["maximum", "exclusiveMaximum"])] = least + self.rng.choice(
                [2, 20, 100_000]
            )
        elif self.rng.random() < 0.5:
            schema["multipleOf"] = self.rng.choice([2, 3, 10, 37])
        return schema

    def number(self) -> Schema:
        if self.ending:
            return self.integer()
        least = round(self.rng.uniform(-100, 100), self.rng.randrange(4))
        schema: Schema = {"type": "number"}
        if self.rng.random() < 0.8:
            schema[self.rng.choice(["minimum", "exclusiveMinimum"])] = least
        if self.rng.random() < 0.8:
            schema[self.rng.choice(["maximum", "exclusiveMaximum"])] = least + 7.5
        return schema

    def literal(self) -> Schema:
        values: list[Any] = [*WORDS, 1, -7, 2.5, True, None, [1, "a"], {"k": [None]}]
        if self.rng.random() < 0.3:
            return {"const": self.rng.choice(values)}
        return {"enum": self.rng.sample(values, self.rng.randint(1, 5))}

    def reference(self) -> Schema:
        if not self.definitions:
            return self.scalar()
        return {"$ref": f"#/$defs/{self.rng.choice(sorted(self.definitions))}"}

    def object(self, depth: int) -> Schema:
        names = self.rng.sample(NAMES, self.rng.randrange(5))
        schema: Schema = {
            "type": "object",
            "properties": {name: self.any(depth) for name in names},
            "required": [name for name in names if self.rng.random() < 0.6],
        }
        kind = self.rng.randrange(6)
        if self.ending:
            schema["additionalProperties"] = False
        elif kind == 0:
            schema["additionalProperties"] = self.scalar()
            schema["required"] = names
            schema["maxProperties"] = len(names) + 2
        elif kind == 1:
            schema["patternProperties"] = {"^p_": self.scalar()}
            schema["additionalProperties"] = False
        else:
            schema["additionalProperties"] = False
        return schema

    def array(self, depth: int) -> Schema:
        least = self.rng.randrange(3)
        return {
            "type": "array",
            "items": self.any(depth),
            "minItems": least,
            "maxItems": least + self.rng.randrange(4),
        }

    def tuple(self, depth: int) -> Schema:
        return {
            "type": "array",
            "prefixItems": [self.any(depth) for _ in range(self.rng.randint(1, 3))],
            "items": False,
            "minItems": self.rng.randrange(2),
        }

    def union(self, depth: int) -> Schema:
        if self.rng.random() < 0.4:
            kinds = [{"type": "null"}, self.string(), self.integer(), self.object(depth)]
            return {"oneOf": self.rng.sample(kinds, self.rng.randint(2, 4))}
        return {"anyOf": [self.any(depth) for _ in range(self.rng.randint(1, 3))]}

    def all_of(self) -> Schema:
        least = self.rng.randint(-50, 50)
        return {
            "allOf": [
                {"type": "integer", "minimum": least},
                {"type": ["integer", "string"], "maximum": least + 30},
            ]
        }
