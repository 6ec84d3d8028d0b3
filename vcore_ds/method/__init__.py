"""The paper's mathematics on plain tensors. Knows no recipe, no engine, no process group.

Notation (see docs/method.md for the map from equations to functions to tests):

| symbol | here | shape |
|---|---|---|
| `i` | a sequence of the batch; a token's sequence is `sequence_index` | `[N]` |
| `n_i` | `num_tokens`, supervised tokens of a sequence | `[num_sequences]` |
| `l[i,t]` | `losses`, nats, fp32 | `[N]` |
| `s[i,t]` | `utilities`, directional derivative of `l` along the probe direction | `[N]` |
| `b[i,t]` | base measure, uniform unless `log_base` is given | `[N]` |
| `q[i,t]` | `weights`, sum to 1 over a sequence | `[N]` |
| `tau` | `temperature`, multiplies utilities | `[num_sequences]` |
| `alpha` | `alpha`, variance-control factor | scalar |

Ragged: N counts the supervised tokens of all sequences in a micro-batch, in row-major order.
"""
