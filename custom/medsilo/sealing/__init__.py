"""Sealed mixing: the server adds up numbers that it cannot read.

Two ways, for a study of at least three hospitals:

`group`     The hospitals share one key that the server lacks. Each masks its numbers with a stream of that key; the
            server mixes what it cannot read by any public weights; the hospitals take the mixed masks off. It protects
            against the server and against whoever reads its disk, as long as no hospital gives the key away: a single
            hospital that helps the server opens every upload. Any number of hospitals may drop out.
`pairwise`  Masks of pairs of hospitals cancel in the sum (Bonawitz et al. 2017), each hospital adds one of its own, and
            both kinds are shared among the hospitals so that `threshold` of them can take off what a dropout leaves.
            A server that follows the protocol, together with fewer than `threshold` hospitals, learns the sums and
            nothing more. With `confirm` the hospitals first sign which uploads are added, and the same holds of a
            server that lies, together with fewer than 2 * threshold - K of the K hospitals.

Neither hides the result from those who may read it: whoever knows the sum and all addends but one knows that one. Sums
over different hospitals in successive rounds differ by about the model of whoever is missing in one of them. Neither
proves that a result is right: a server that adds numbers of its own changes the result, unseen, by just those. And the
signatures on the keys are worth what the root of the certificates is worth: who holds its private key can sign keys of
hospitals that do not exist.
"""
