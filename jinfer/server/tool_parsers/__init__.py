"""How models write calls of tools and thoughts: a file for each format, read as the text comes.

A reader of a format is a generator that pauses wherever it needs more text than has come
(`Machine` runs it), so that it reads like a parser of a whole text, and gives the same whatever
pieces the text comes in.

- `reader`, `output`: what such a generator reads from, and tells its findings to
- `json_text`, `calls`: JSON as it comes, and calls written in it
- `hermes`, `qwen_coder`, `llama`, `mistral`, `deepseek`, `dsml`, `harmony`, and in `listed` those
  of Granite, Phi and Command R: the formats, each with the grammar of its calls
- `thinking`: thoughts between marks
- `formats`: which format a chat template speaks
- `lark`: pieces of grammars
- `shape`, `written`: earlier calls as a template wants them; tools for templates without them
"""
