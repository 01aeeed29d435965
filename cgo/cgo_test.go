package cgo

import (
	"errors"
	"testing"
)

func TestProbeIsOneOfItsStates(t *testing.T) {
	v := Probe()
	t.Logf("%+v: %v", v, v.Err())
	if Enabled == (v.State == NotBuilt) {
		t.Errorf("cgo is enabled: %t, yet the probe says %+v", Enabled, v)
	}
	if v.State < NotBuilt || v.State > Listed {
		t.Errorf("unknown state %d", v.State)
	}
	if v.State != Listed && len(v.Devices) > 0 {
		t.Errorf("devices without a list: %+v", v)
	}
}

func TestEveryLackHasAReasonAndARemedy(t *testing.T) {
	for state := NotBuilt; state <= Listed; state++ {
		v := Verbs{State: state, Detail: "detail"}
		if v.Reason() == "" || v.Remedy() == "" || v.Err() == nil {
			t.Errorf("state %d: reason %q, remedy %q, err %v", state, v.Reason(), v.Remedy(), v.Err())
		}
		if unsupported := errors.Is(v.Err(), ErrNotSupported); unsupported == (state == Failed) {
			t.Errorf("state %d: a failed probe is not conclusive and the others are, got %v", state, v.Err())
		}
	}
	v := Verbs{State: Listed, Devices: []string{"mlx5_0"}}
	if v.Reason() != "" || v.Remedy() != "" || v.Err() != nil {
		t.Errorf("with a device: %q, %q, %v", v.Reason(), v.Remedy(), v.Err())
	}
}
