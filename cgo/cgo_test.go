package cgo

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"unsafe"
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

// The sizes that the C compiler sees are those that the Go compiler sees.
func TestStructSizes(t *testing.T) {
	if !Enabled {
		t.Skip("built without cgo")
	}
	want := []uint64{
		uint64(unsafe.Sizeof(WR{})), uint64(unsafe.Sizeof(Recv{})), uint64(unsafe.Sizeof(WC{})), uint64(unsafe.Sizeof(DeviceAttr{})),
		uint64(unsafe.Sizeof(PortAttr{})), uint64(unsafe.Sizeof(GID{})), uint64(unsafe.Sizeof(QPCaps{})), uint64(unsafe.Sizeof(QPAttr{})),
		uint64(unsafe.Sizeof(Keys{})), uint64(unsafe.Sizeof(AsyncEvent{})), uint64(unsafe.Sizeof(Handles{})), 4360,
	}
	if got := structSizes(); !slices.Equal(got, want) {
		t.Errorf("C has %d, Go %d", got, want)
	}
}

func TestOpeningNothing(t *testing.T) {
	d, err := Open("no-such-device0")
	if d != nil || err == nil {
		t.Fatalf("opened %v, %v", d, err)
	}
	if v := Probe(); v.State < Failed && !errors.Is(err, ErrNotSupported) {
		t.Errorf("%v, in a build or on a host without verbs", err)
	}
	if n := Live().Total(); n != 0 {
		t.Errorf("%d objects are left", n)
	}
}

func TestGIDFromSysfs(t *testing.T) {
	root := t.TempDir()
	write := func(name, text string) {
		file := filepath.Join(root, "mlx5_0/ports/1", name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write("gids/3", "0000:0000:0000:0000:0000:ffff:0a09:0001\n")
	write("gid_attrs/types/3", "RoCE v2\n")
	write("gids/4", "fe80:0000:0000:0000:0000:ffff:0a09\n")
	g, err := gidFromSysfs(root, "mlx5_0", 1, 3)
	want := GID{Addr: [16]byte{10: 0xff, 11: 0xff, 12: 10, 13: 9, 15: 1}, Index: 3, Port: 1, Type: GIDRoCEv2}
	if err != nil || g != want {
		t.Errorf("got %+v, %v", g, err)
	}
	for _, index := range []int{4, 5} {
		if g, err := gidFromSysfs(root, "mlx5_0", 1, index); err == nil {
			t.Errorf("index %d: read %+v", index, g)
		}
	}
}

func TestRates(t *testing.T) {
	for _, c := range []struct {
		width, speed uint32
		mbps         uint64
	}{{1, 1, 2500}, {2, 32, 100000}, {2, 64, 200000}, {2, 128, 400000}, {0, 0, 0}, {3, 1, 0}} {
		if got := (&PortAttr{width: c.width, speed: c.speed}).RateMbps(); got != c.mbps {
			t.Errorf("width %d speed %d: %d, want %d", c.width, c.speed, got, c.mbps)
		}
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
