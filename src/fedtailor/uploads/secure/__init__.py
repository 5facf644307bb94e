"""Secure aggregation: the server learns the sum of a cohort's updates, and no single one.

Client u of a cohort adds to its values x_u, whole numbers modulo 2^32, a mask of its own, made from
a seed b_u, and one with each neighbour v, made from what the two agree on. The server gets

    y_u = x_u + PRG(b_u) + sum_{u < v} PRG(s_uv) - sum_{u > v} PRG(s_uv)  (mod 2^32)

and the masks of pairs cancel in the sum of all y_u. Of each client u, b_u and the secret key behind
its s_uv are shared among its neighbours. For clients that have sent y_u these tell the server b_u,
for clients that have left the secret key, and never both of one client.

One file an idea: `config` (how many must stay, how many neighbours), `fixed_point` and
`discrete_gaussian` (clients' noise), `keys` (and masks), `shamir`, `messages`, `client` and
`server` (the rounds of the protocol), `link` (of the chain), `simulation` (the clients' sides in
one process).

Sources:
- K. Bonawitz et al. Practical Secure Aggregation for Privacy-Preserving Machine Learning. CCS 2017.
- neighbours: J. H. Bell et al. Secure Single-Server Aggregation with (Poly)Logarithmic Overhead.
  CCS 2020. There clients draw their neighbours; here these follow from the round's name.
"""
