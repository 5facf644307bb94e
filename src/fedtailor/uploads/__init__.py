"""The chain that uploads pass through, from a client's training to the method's `aggregate`.

Each link is one file with one class, a `chain.Link`. Its ends are ``send`` at the client, which
runs before the upload leaves it; ``receive`` (or ``watch``) at the server, for each upload that
arrives; ``gather``, for all of them; and ``total``, for what is aggregated. What it does not
override changes nothing. ``needs`` says whether it works with sums alone, or with single uploads.
`engine.prepare.upload_chain` builds the chain from the settings; nobody else names a link.

A link to come is one file and one line there, as `private.Private` is. `secure.link.Secure`, the
last one at a client, hides single uploads from the server: the links before it see the sum alone.
"""
