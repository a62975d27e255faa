// One row of the embedding; see args.h.

inline void embed_row(const EmbedArgs& args, int row) {
  decode_row(*args.table, args.token_ids[row], args.output + row * args.output_stride);
}
