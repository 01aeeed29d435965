// Package vf has the tests of virtual functions: they need the lab's scenario of that name, whose machine has a card with
// SR-IOV. The card has no RDMA of its own: soft RoCE is put on its functions' interfaces as soon as they appear, as udev
// would do.
package vf
