"""Return the received model unchanged, as the training script of the benchmark's NVFlare reference."""

import nvflare.client as flare


def main() -> None:
    flare.init()
    while flare.is_running():
        model = flare.receive()
        flare.send(flare.FLModel(params=model.params, metrics={"accuracy": 0.5}, meta={"NUM_STEPS_CURRENT_ROUND": 8}))


if __name__ == "__main__":
    main()
