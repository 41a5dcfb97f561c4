"""Local stand-ins for the repositories that Bazel 4 would download even for Python alone.

Its toolchains load rules for C++ and Java, and each test depends on a tool that merges
coverage reports. The rules are built into Bazel 4, so files that pass them on are enough.
Coverage reports are not supported.
"""

_CC_RULES = ["cc_binary", "cc_import", "cc_library", "cc_proto_library", "cc_test", "cc_toolchain", "cc_toolchain_suite", "objc_library"]

_JAVA_RULES = ["java_binary", "java_import", "java_library", "java_plugin", "java_runtime", "java_test", "java_toolchain"]

_NO_COVERAGE = """
filegroup(
    name = "coverage_report_generator",
    srcs = ["none.sh"],
    visibility = ["//visibility:public"],
)
"""

def _stand_in_impl(ctx):
    for path, content in ctx.attr.files.items():
        ctx.file(path, content)

_stand_in = repository_rule(
    implementation = _stand_in_impl,
    attrs = {"files": attr.string_dict(mandatory = True, doc = "content by path")},
    doc = "A repository that consists of these files.",
)

def _pass_on(rules):
    return "\n".join(["%s = native.%s" % (rule, rule) for rule in rules]) + "\n"

def offline_repositories():
    """Declare the stand-ins, so that nothing is fetched."""
    _stand_in(name = "rules_cc", files = {"cc/BUILD": "", "cc/defs.bzl": _pass_on(_CC_RULES)})
    _stand_in(name = "rules_java", files = {"java/BUILD": "", "java/defs.bzl": _pass_on(_JAVA_RULES)})
    _stand_in(name = "remote_coverage_tools", files = {"BUILD": _NO_COVERAGE, "none.sh": "exit 1\n"})
