package main

import "testing"

func TestAdminFound(t *testing.T) {
	for _, c := range []struct{ admin, public, want string }{
		{"127.0.0.1:8001", "10.0.0.1:8000", "127.0.0.1:8001"},
		{"10.0.0.2:8001", "10.0.0.1:8000", "10.0.0.2:8001"},
		{"0.0.0.0:8001", "10.0.0.1:8000", "10.0.0.1:8001"},
		{"[::]:8001", "[fd00::1]:8000", "[fd00::1]:8001"},
		{"[::]:8001", "router.example:443", "router.example:8001"},
		{"[::]:8001", "[::]:8000", "[::]:8001"},
		{"[::]:8001", "127.0.0.1:8000", "[::]:8001"},
		{"[::]:8001", "nonsense", "[::]:8001"},
	} {
		if got := adminFound(c.admin, c.public); got != c.want {
			t.Errorf("%s beside %s: %s, want %s", c.admin, c.public, got, c.want)
		}
	}
}
