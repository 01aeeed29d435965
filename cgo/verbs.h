#ifndef HEADRACE_VERBS_H
#define HEADRACE_VERBS_H

#include <stdint.h>

enum hr_state { HR_NO_HEADERS = 1, HR_NO_LIBRARY = 2, HR_FAILED = 3, HR_LISTED = 4 };

#define HR_DEVICES_MAX 64
#define HR_NAME_BYTES 64
#define HR_DETAIL_BYTES 256

/* Fixed width throughout: this struct crosses into Go. */
struct hr_probe {
	int32_t state;
	int32_t devices;
	char names[HR_DEVICES_MAX][HR_NAME_BYTES];
	char detail[HR_DETAIL_BYTES];
};

uint64_t hr_probe_size(void);
void hr_probe_verbs(struct hr_probe *p);

#endif
