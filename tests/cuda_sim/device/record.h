// The record of what torch asks of the pretended GPU: one line per event, with the thread and fields of `name=value`.
#pragma once

// Append an event to the record, if one is being made.
__attribute__((visibility("hidden"), format(printf, 1, 2))) void record(const char *format, ...);

// True while the device waits for a lost rank: until a communicator is aborted.
__attribute__((visibility("hidden"))) extern volatile int waits_for_lost;
