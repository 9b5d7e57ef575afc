// libge_runner, libgraph: libtorch_npu links them and uses nothing of them here.
extern "C" __attribute__((visibility("default"))) const char vnpu_is_the_provider[] = "vnpu";
