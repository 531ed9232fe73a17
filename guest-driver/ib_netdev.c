// SPDX-License-Identifier: GPL-2.0
/*
 * A network interface of the device's own, where the guest has none with its MAC: addresses that it
 * is given are GIDs of the port. It carries no packets, and peers need no MAC.
 */
#include <linux/etherdevice.h>
#include <linux/if_arp.h>

#include "ib.h"

/* Long enough for the longest packet of RDMA. */
#define FV_OWN_MTU 9000

static netdev_tx_t fv_own_xmit(struct sk_buff *skb, struct net_device *netdev)
{
	dev_core_stats_tx_dropped_inc(netdev);
	kfree_skb(skb);
	return NETDEV_TX_OK;
}

static const struct net_device_ops fv_own_ops = {
	.ndo_start_xmit = fv_own_xmit,
};

static void fv_own_setup(struct net_device *netdev)
{
	ether_setup(netdev);
	netdev->netdev_ops = &fv_own_ops;
	netdev->flags |= IFF_NOARP;
	netdev->mtu = FV_OWN_MTU;
	netdev->max_mtu = FV_OWN_MTU;
}

/**
 * fv_own_netdev_add - make a device, which listens to interfaces, one of its own
 * @dev: device, with a MAC
 *
 * Return: 0, and it is bound to that; or an error number.
 */
int fv_own_netdev_add(struct fv_device *dev)
{
	struct net_device *netdev;
	int err;

	netdev = alloc_netdev(0, "farlane%d", NET_NAME_ENUM, fv_own_setup);
	if (!netdev)
		return -ENOMEM;
	SET_NETDEV_DEV(netdev, dev->function);
	eth_hw_addr_set(netdev, dev->mac);
	/* The notifier finds it by its MAC. */
	err = register_netdev(netdev);
	if (err) {
		free_netdev(netdev);
		return err;
	}
	dev->own_netdev = netdev;
	return 0;
}

/* Nobody has it from the device any more. */
void fv_own_netdev_del(struct fv_device *dev)
{
	if (!dev->own_netdev)
		return;
	unregister_netdev(dev->own_netdev);
	free_netdev(dev->own_netdev);
	dev->own_netdev = NULL;
}
