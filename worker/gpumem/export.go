package gpumem

import (
	"errors"
	"fmt"

	"github.com/headrace/headrace/cgo"
)

// Export gives GPU memory as a dma-buf to be lent to the daemon. Where the driver takes memory of several segments not as one,
// or none at all, the error is cgo.ErrNotSupported, and Staging the way.
func Export(x *cgo.GPUContext, addr, size uint64) (cgo.DMABuf, error) {
	parts, err := x.Export(addr, size)
	if err != nil {
		return cgo.DMABuf{FD: -1}, err
	}
	if len(parts) == 1 {
		return parts[0], nil
	}
	err = fmt.Errorf("export %d bytes of GPU memory as one dma-buf: %w: the driver gives %d, one a segment (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False gives one)", size, cgo.ErrNotSupported, len(parts))
	for i := range parts {
		err = errors.Join(err, parts[i].Close())
	}
	return cgo.DMABuf{FD: -1}, err
}
