// The machine's ceiling on one thread; see args.h.

// Twelve independent chains of products in registers: more than latency times throughput of any
// unit that these instruction sets run on. Returns a number so that nothing can be left out.
inline float ceiling_compute(CeilingKind kind, int rounds) {
  alignas(64) const uint8_t bytes[64] = {1};
  vbytes u = load_bytes(bytes);
  float result = 0.0f;
  if (kind == CeilingKind::kInt8) {
    vi acc[kCeilingChains];
    // Chains must differ, or a compiler computes one of them.
    HB_UNROLL for (int i = 0; i < kCeilingChains; ++i) acc[i] = iset1(i);
    for (int round = 0; round < rounds; ++round) {
      HB_UNROLL for (int step = 0; step < kCeilingUnroll; ++step) {
        HB_UNROLL for (auto& a : acc) a = dot4(a, u, 0x01010101);
      }
    }
    HB_UNROLL for (auto& a : acc) result += static_cast<float>(sum(a));
    return result;
  }
  vf acc[kCeilingChains];
  HB_UNROLL for (int i = 0; i < kCeilingChains; ++i) acc[i] = set1(static_cast<float>(i));
  const vf factor = set1(0.5f);
  for (int round = 0; round < rounds; ++round) {
    HB_UNROLL for (int step = 0; step < kCeilingUnroll; ++step) {
      HB_UNROLL for (auto& a : acc)
        a = kind == CeilingKind::kBf16 ? dot2(a, u, 0x3f803f80) : fma(a, factor, factor);
    }
  }
  HB_UNROLL for (auto& a : acc) result += sum(a);
  return result;
}

// Multiply-adds of one round on one thread.
inline int64_t ceiling_round_products(CeilingKind kind) {
  const int64_t lanes = kind == CeilingKind::kInt8 ? 64 : kind == CeilingKind::kBf16 ? 32 : 16;
  return lanes * kCeilingChains * kCeilingUnroll;
}

// Reads all bytes once, as a kernel that streams weights does.
inline int ceiling_read(const CeilingRead& args) {
  vi a = izero(), b = izero();
  for (size_t at = 0; at < args.bytes; at += 1024) {
    HB_UNROLL for (size_t line = 0; line < 1024; line += 128) {
      __builtin_prefetch(args.data + at + line + 4096);
      __builtin_prefetch(args.data + at + line + 4096 + 64);
      a = dot4(a, load_bytes(args.data + at + line), 0x01010101);
      b = dot4(b, load_bytes(args.data + at + line + 64), 0x01010101);
    }
  }
  return sum(a + b);
}
