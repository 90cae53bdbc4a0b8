from medsilo.core.package import check_nvflare

check_nvflare()
