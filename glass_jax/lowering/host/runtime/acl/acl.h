// TileLang includes this name; what it stands for is in kernel.h, which comes first in every translation unit.
#pragma once
