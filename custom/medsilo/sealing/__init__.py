"""Sealed mixing: the server adds up numbers that it cannot read.

For a study of at least three hospitals. Masks of pairs of hospitals cancel in the sum (Bonawitz et al. 2017), each
hospital adds one of its own, and both kinds are shared among the hospitals so that `threshold` of them can take off
what a dropout leaves. A server that follows the protocol, together with fewer than `threshold` hospitals, learns the
sums and nothing more. With `confirm` the hospitals first sign which uploads are added, and the same holds of a server
that lies, together with fewer than 2 * threshold - K of the K hospitals.

It needs the sites' certificates against a server that swaps keys, and the signatures are worth what the certificates'
root is worth: who holds its private key can sign keys of hospitals that do not exist.

What it does not hide: the result, from those who may read it. Whoever knows a sum and all addends but one knows that
one; sums over different hospitals in successive rounds differ by about the model of who is missing in one of them; sums
of the same numbers with different weights tell their readers more than each alone. Of K hospitals that each get a
mixture of their own, half can put theirs together and work out the models of all others (`Terms.safe_with_rows`).

What it does not prove: that a result is right. A server that adds numbers of its own to a sum, or a hospital that sends
wrong ones, changes the result by just those, and nobody sees it.
"""
