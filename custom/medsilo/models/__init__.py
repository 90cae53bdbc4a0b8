"""Networks: MONAI's where it has them, and the papers' others."""

from medsilo.models.activity_cnn import ActivityCnn
from medsilo.models.alexnet import AlexNet
from medsilo.models.basic_unet import BasicUNet
from medsilo.models.densenet121 import DenseNet121
from medsilo.models.lenet5 import LeNet5
from medsilo.models.network import Network
from medsilo.models.small_cnn import SmallCnn
from medsilo.models.unet import UNet
from medsilo.models.vgg11 import Vgg11

NETWORKS: dict[str, type[Network]] = {
    "activity-cnn": ActivityCnn,
    "alexnet": AlexNet,
    "basic-unet": BasicUNet,
    "densenet121": DenseNet121,
    "lenet5": LeNet5,
    "small-cnn": SmallCnn,
    "unet": UNet,
    "vgg11": Vgg11,
}
