"""Protect NVFlare against broken connections and against malicious senders. Any NVFlare application can use this
package.
"""
