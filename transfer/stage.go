package transfer

import (
	"errors"
	"fmt"
	"runtime/debug"
)

// stageStep is how many bytes are copied under one hold of the guard: what a fence may have to wait for.
const stageStep = 256 << 10

// Gather copies the payload into b, which is as long as the payload. It enters the guard itself, step by step: what was
// gathered was read before the fence. The error is ErrFenced or ErrMemory; b is of no use then.
func (w *Write) Gather(b []byte) error {
	return stage(w.Src, w.Runs, b, w.Enter, w.Leave, true)
}

// Scatter copies b, which holds the whole payload, into the blocks. It enters the guard itself, step by step. The error
// is ErrFenced, or ErrMemory, of which the lease has been told.
func (x *Landing) Scatter(b []byte) error {
	err := stage(x.Dst, x.Runs, b, x.Enter, x.Leave, false)
	if err != nil && !errors.Is(err, ErrFenced) {
		x.Fault(err)
	}
	return err
}

func stage(r *Region, runs []Run, b []byte, enter func() bool, leave func(), gather bool) error {
	for len(runs) > 0 {
		n, size := 0, uint64(0)
		for n < len(runs) && (n == 0 || size+runs[n].Len <= stageStep) {
			size += runs[n].Len
			n++
		}
		if !enter() {
			return ErrFenced
		}
		err := copyRuns(r.Bytes(), runs[:n], b, gather)
		leave()
		if err != nil {
			return err
		}
		runs, b = runs[n:], b[size:]
	}
	return nil
}

// copyRuns copies between the runs of one end and b. A fault in the lent memory (see Region) is an error.
func copyRuns(mem []byte, runs []Run, b []byte, gather bool) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if fault := recover(); fault != nil {
			err = faultError("copy runs", fault)
		}
	}()
	if gather {
		for i := range runs {
			r := &runs[i]
			copy(b, mem[r.Src:r.Src+r.Len])
			b = b[r.Len:]
		}
		return nil
	}
	for i := range runs {
		r := &runs[i]
		copy(mem[r.Dst:r.Dst+r.Len], b)
		b = b[r.Len:]
	}
	return nil
}

// faultError makes an error of a recovered memory fault. Any other panic goes on.
func faultError(doing string, fault any) error {
	if _, ok := fault.(interface{ Addr() uintptr }); !ok {
		panic(fault)
	}
	return fmt.Errorf("%s: %w: %v", doing, ErrMemory, fault)
}
