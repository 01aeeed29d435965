package version

import "testing"

func TestGetIsNeverEmpty(t *testing.T) {
	if i := Get(); i.Version == "" || i.Go == "" || i.Platform == "" {
		t.Errorf("%+v", i)
	}
}
