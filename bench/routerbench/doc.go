// Package routerbench measures the router beside the direct path, nginx, HAProxy and sglang-router, all on this machine and
// in turn, against two stand-ins that answer at once. The load comes from this process; everything else is in processes
// of its own, as it would be in service.
package routerbench
