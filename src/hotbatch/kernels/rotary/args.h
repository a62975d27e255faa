// Rotary position embedding fused with what surrounds it: per-head RMS norm before it (Qwen3),
// and the write of rotated keys and values into the paged cache after it.
#pragma once

#include "attention/args.h"
#include "csrc/batch.h"

namespace hotbatch {

struct RotaryArgs {
  const Batch* batch = nullptr;    // positions and slots of its rows
  const float* qkv = nullptr;      // [N, (q_heads + 2 * kv_heads) * head_dim]
  int q_heads = 0;
  KvLayout layout;                 // kv_heads, head_dim, dtype, block size
  const float* q_norm = nullptr;   // [head_dim] RMS norm weight of every q head, or null
  const float* k_norm = nullptr;   // the same of every k head
  float eps = 1e-6f;
  // cos and sin of position * inverse frequency, attention scaling included, as the model's
  // configuration says. Rotation pairs dim i with i + rotary_dim / 2 ("rotate half").
  const float* cos = nullptr;      // [max_positions, rotary_dim / 2]
  const float* sin = nullptr;
  int rotary_dim = 0;              // even; the dims from it on stay as they are. 0: head_dim
  void* q_out = nullptr;           // [N][query_row_bytes(layout, q_heads)]
  void* kv = nullptr;              // this layer's cache, see attention/args.h
};

}  // namespace hotbatch
