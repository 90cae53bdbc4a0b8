"""Protect NVFlare against broken connections and senders that misbehave. Any NVFlare application can use this
package.
"""
