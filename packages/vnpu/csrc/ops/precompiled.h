#pragma once

// What the files of operators begin with, compiled once: parsing ATen's headers takes longer than
// compiling most of these files.

#include "ops/operator.h"
