// How numbers are stored.
#pragma once

namespace jinfer {

enum class Kind { f32, bf16, f16, codes };

inline int bytes_of(Kind kind) { return kind == Kind::f32 ? 4 : 2; }

}  // namespace jinfer
