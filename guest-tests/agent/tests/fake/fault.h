// Common part of the doubles of vendors' libraries: the one fault that is planted.
#pragma once
#include <cstdlib>
#include <cstring>

// Whether the environment plants this fault, alone or among others with commas in between. A name is `place` or `place:detail`.
inline bool fault(const char *name) {
    static const char *planted = std::getenv("EGM_FAKE_FAULT");
    const size_t length = std::strlen(name);
    for (const char *at = planted; at; at = std::strchr(at, ',')) {
        at += *at == ',';
        if (std::strncmp(at, name, length) == 0 && (at[length] == 0 || at[length] == ',')) return true;
    }
    return false;
}

// A number of the environment, or what it is without one.
inline long number(const char *name, long otherwise) {
    const char *text = std::getenv(name);
    return text ? std::strtol(text, nullptr, 10) : otherwise;
}
