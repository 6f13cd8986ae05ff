"""Random JSON schemas whose keywords meet: many of them are hard to satisfy, some impossible."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]

NAMES = ("a", "b", "ab", "x_1", "é", 'q"', "", "li\nne")
PATTERNS = (
    *("^a$", "^(a|b)$", "^a", "b", "^x_[0-9]+$", "^.$", ".*", "^[^a]", "^ab?$", "^$", "^\\S+$"),
    *("^[ab]{1,2}$", "^(a|b|ab|x_1|é)$", "^[a-z]", "^[^a-z]"),
)
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -3,
    5,
    6,
    2.5,
    0.1,
    10,
    "",
    "a",
    "ab",
    "li\nne",
    [],
    [1],
    [1, "a"],
)
FORMATS = ("ipv4", "date", "uuid")
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")


def mixed_schema(seed: int) -> Schema:
    """A schema by its number; the same one each time."""
    return _Generator(random.Random(seed)).root()


class _Generator:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.definitions: tuple[str, ...] = ()

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def root(self) -> Schema:
        names = ("p", "q")[: self.rng.randrange(3)]
        self.definitions = names
        definitions = {name: self.schema(1) for name in names}
        schema = self.object(3) if self.chance(0.6) else self.some(3)
        return {**schema, "$defs": definitions} if names else schema

    def schema(self, depth: int) -> Any:
        if self.chance(0.06):
            return self.chance(0.5)
        return self.some(depth)

    def some(self, depth: int) -> Schema:
        kinds = [self.number, self.string, self.enum, self.const, self.types]
        if self.definitions:
            kinds.append(self.reference)
        if depth > 0:
            kinds += [lambda: self.object(depth - 1), lambda: self.array(depth - 1)]
            kinds += [lambda: self.union(depth - 1), lambda: self.both(depth - 1)]
        schema = self.rng.choice(kinds)()
        if self.chance(0.15):  # keywords of several kinds side by side
            other = self.rng.choice(kinds)()
            schema = {**other, **schema} if self.chance(0.5) else {**schema, **other}
        return schema

    def types(self) -> Schema:
        return {"type": self.rng.sample(TYPES, self.rng.randint(1, 3))}

    def reference(self) -> Schema:
        return {"$ref": f"#/$defs/{self.rng.choice(self.definitions)}"}

    def enum(self) -> Schema:
        return {"enum": self.rng.sample(VALUES, self.rng.randint(1, 5))}

    def const(self) -> Schema:
        return {"const": self.rng.choice(VALUES)}

    def number(self) -> Schema:
        schema: Schema = {"type": self.rng.choice(["integer", "number"])}
        if self.chance(0.2):
            del schema["type"]
        for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            if self.chance(0.35):
                low = -4 if "inimum" in key else 2
                value = low + self.rng.randrange(8)
                schema[key] = value + self.rng.choice([0, 0, 0.5, 0.25])
        if self.chance(0.3):
            schema["multipleOf"] = self.rng.choice([1, 2, 3, 5, 7, 0.5, 0.1, 2.5])
        return schema

    def string(self) -> Schema:
        schema: Schema = {} if self.chance(0.2) else {"type": "string"}
        if self.chance(0.4):
            schema["minLength"] = self.rng.randrange(4)
        if self.chance(0.4):
            schema["maxLength"] = self.rng.randrange(6)
        if self.chance(0.3):
            schema["pattern"] = self.rng.choice(PATTERNS)
        elif self.chance(0.2):
            schema["format"] = self.rng.choice(FORMATS)
        return schema

    def object(self, depth: int) -> Schema:
        schema: Schema = {} if self.chance(0.15) else {"type": "object"}
        parts = ["properties", "patternProperties", "additionalProperties", "required"]
        self.rng.shuffle(parts)
        for part in parts:
            if self.chance(0.35):
                continue
            if part == "properties":
                names = self.rng.sample(NAMES, self.rng.randint(1, 4))
                schema[part] = {name: self.schema(depth) for name in names}
            elif part == "patternProperties":
                patterns = self.rng.sample(PATTERNS, self.rng.choice([1, 1, 1, 2]))
                schema[part] = {pattern: self.schema(depth) for pattern in patterns}
            elif part == "additionalProperties":
                schema[part] = False if self.chance(0.6) else self.schema(depth)
            else:
                schema[part] = self.rng.sample(NAMES, self.rng.randint(0, 3))
        if self.chance(0.15):
            schema["minProperties"] = self.rng.randrange(4)
        if self.chance(0.15):
            schema["maxProperties"] = self.rng.randrange(4)
        return schema

    def array(self, depth: int) -> Schema:
        schema: Schema = {} if self.chance(0.15) else {"type": "array"}
        if self.chance(0.5):
            schema["prefixItems"] = [self.schema(depth) for _ in range(self.rng.randint(1, 3))]
        if self.chance(0.6):
            schema["items"] = False if self.chance(0.4) else self.schema(depth)
        if self.chance(0.4):
            schema["minItems"] = self.rng.randrange(4)
        if self.chance(0.4):
            schema["maxItems"] = self.rng.randrange(4)
        return schema

    def union(self, depth: int) -> Schema:
        key = "anyOf" if self.chance(0.8) else "oneOf"
        return {key: [self.schema(depth) for _ in range(self.rng.randint(1, 3))]}

    def both(self, depth: int) -> Schema:
        return {"allOf": [self.schema(depth) for _ in range(self.rng.randint(1, 3))]}
